"""`kvbm status`, `kvbm stop` and `kvbm logs`: finds the engines that `kvbm serve` has started."""
