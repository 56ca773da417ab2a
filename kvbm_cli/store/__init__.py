"""Access of commands to the objects of the shared tier: list, read, verify, delete. Engines use `kvbm/shared`."""
