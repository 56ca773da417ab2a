"""What the results of a cell mean: statistics, answers, comparisons, and the verdict with its sentence. Pure."""
