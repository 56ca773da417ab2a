"""`kvbm try`: from a command that starts an engine to a measured answer. It only decides; `kvbm bench` measures."""
