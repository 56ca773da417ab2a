"""The embedded engine: a small reference engine with an HTTP server, for trying kvbm without vLLM."""
