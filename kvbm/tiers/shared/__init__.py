"""Shared tier (G4): extents of blocks as objects in a store that many engines share."""
