"""Algorithms on a virtual clock."""
