"""Profiles: reads files, variables and overrides, checks them, and resolves them to one frozen `Profile`."""
