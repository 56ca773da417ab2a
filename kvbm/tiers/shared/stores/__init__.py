"""Stores of the shared tier, one module for each kind, and `open`, which chooses one by its URL."""
