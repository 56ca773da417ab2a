"""Trace files in Mooncake's format: reader, analysis, `kvbm bench trace`, and the requests of a trace workload."""
