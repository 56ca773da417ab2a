"""`kvbm top`: what running engines do, live."""
