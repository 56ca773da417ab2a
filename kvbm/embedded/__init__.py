"""The module path that users' command lines name."""
