"""Metrics server, hit rate log and recording of decisions."""
