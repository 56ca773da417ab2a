"""Identity of a model: digests of the files that determine its KV cache."""
