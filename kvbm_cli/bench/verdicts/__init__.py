"""What the records of a cell mean: answers, comparisons, and the verdict on them."""
