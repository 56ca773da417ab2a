"""How a store chooses the blocks that it evicts: one module per policy, and the table of them."""
