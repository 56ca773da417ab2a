"""`kvbm bench --find-limit`: the highest rate of requests at which an engine keeps limits of its times."""
