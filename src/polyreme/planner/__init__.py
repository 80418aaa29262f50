"""Finds the best plan."""
