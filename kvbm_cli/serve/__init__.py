"""`kvbm serve`: starts an engine with a profile and supervises it until it ends."""
