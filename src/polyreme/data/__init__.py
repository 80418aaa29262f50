"""Data sets by sample index, and the order in which they are read."""
