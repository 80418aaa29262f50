"""The plan: its form, its checks."""
