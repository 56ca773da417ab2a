"""Processes, files, sockets and HTTP requests, for all commands."""
