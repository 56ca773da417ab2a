"""kvbm inside vLLM: `connector` runs in the engine's processes, `launch` and `versions` make its command line."""
