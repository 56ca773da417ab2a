"""Starts, watches and stops one engine process, and explains why it failed."""
