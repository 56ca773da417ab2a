"""Host memory (G2): shared segments, control words and memory layout."""
