"""Solvers: one file each, one signature."""
