"""Files in the formats of other benchmark tools, derived from the records of a run."""
