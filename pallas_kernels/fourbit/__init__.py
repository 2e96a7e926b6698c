"""Products whose weights are four bits wide."""
