"""Copies between the device memory of an engine (G1) and host memory (G2), on one rank."""
