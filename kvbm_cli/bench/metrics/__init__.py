"""Metrics of the engine during a run: a sampler in a process of its own, and what its file says."""
