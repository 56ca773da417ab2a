"""`kvbm cache`: lists, verifies and removes caches on disk and, with `--url`, the objects of a shared store."""
