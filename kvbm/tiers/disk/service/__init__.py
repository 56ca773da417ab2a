"""The disk process: its server, and in the leader its client and the supervisor that restarts it."""
