"""Block states, hash index, eviction and admission of one tier. Pure Python, without bytes or I/O."""
