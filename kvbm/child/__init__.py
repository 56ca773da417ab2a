"""Child processes of the leader: how they start and end, and the channel to them."""
