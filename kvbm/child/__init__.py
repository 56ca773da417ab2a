"""Child processes of ours, the only way to start, feed, watch and end one; and runs of short programs."""
