"""Profiles: reads files, variables and overrides, checks them, and resolves them to one frozen `Profile`.

What a profile may name is listed here as well as where it is made: evictions and keys in `schema.py`, engines and their
keys in `engine.py`, schemes of shared stores in `values.py`.
"""
