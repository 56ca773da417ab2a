"""`kvbm bench`: runs the same requests with and without the block manager and compares the results."""
