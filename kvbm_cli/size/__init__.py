"""`kvbm size`: blocks, tokens and bytes of each tier, and what a number of users needs."""
