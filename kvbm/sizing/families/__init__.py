"""Model families: how the layers of a model keep KV. `table.py` has the architectures, and the reader of each."""
