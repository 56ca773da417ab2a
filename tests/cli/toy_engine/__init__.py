"""A fifth engine: what one needs besides its own folder is a row in each of two tables, see `__main__`."""
