"""What an axis costs: one file an axis."""
