"""The disk process: its client in the leader, its server, and the supervisor that restarts it."""
