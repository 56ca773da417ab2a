"""The process that reads and writes the objects of the shared tier: its client in the leader and its server."""
