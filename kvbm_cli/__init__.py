"""The command `kvbm`."""
