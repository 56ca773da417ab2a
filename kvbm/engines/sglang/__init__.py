"""Integration of SGLang: a storage backend below the host memory of its hierarchical cache."""
