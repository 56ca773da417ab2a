"""Output of all commands: streams, errors, progress and shell completion."""
