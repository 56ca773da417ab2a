"""`kvbm plan`: the hit rate that a cache of another size or with another eviction would have."""
