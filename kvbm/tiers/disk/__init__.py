"""The disk tier (G3): blocks in a preallocated file, an index that survives, and the threads that move them."""
