"""Algorithms between replicas."""
