"""What the records of `kvbm bench` say: statistics, correctness, and where the time goes. Pure functions."""
