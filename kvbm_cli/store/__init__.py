"""What is stored below host memory, as commands see it: caches on disk, objects of the shared tier. Engines use
`kvbm/tiers/disk` and `kvbm/tiers/shared`."""
