"""The workloads of LMBenchmark, as its programs send them, and its CSV files. See docs/reference/lmbenchmark.md."""
