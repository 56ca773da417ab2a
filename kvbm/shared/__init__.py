"""Shared tier (G4): runs of blocks as objects in a store that many engines share."""
