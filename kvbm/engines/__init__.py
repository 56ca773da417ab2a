"""One room per engine: all that is true of one engine only."""
