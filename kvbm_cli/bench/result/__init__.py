"""Results: the record of a request, the directory of an experiment, and what was read from it."""
