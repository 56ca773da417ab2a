"""`kvbm cache --url`: lists, verifies and deletes the objects of the shared tier (G4) in a store."""
