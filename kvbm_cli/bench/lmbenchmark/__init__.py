"""The workloads of LMBenchmark, with fixed launch times. See docs/reference/lmbenchmark.md."""
