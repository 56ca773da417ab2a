"""`kvbm profile` and `kvbm size`: lists, shows, checks, compares and writes profiles."""
