"""Workload files of `kvbm bench`: their schema, and how they are read."""
