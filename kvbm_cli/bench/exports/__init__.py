"""Files in the formats of other benchmark tools, from the records of a run."""
