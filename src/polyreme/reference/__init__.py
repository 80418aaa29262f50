"""A plain training loop in one process: what a plan is held to. Imports nothing of the runtime."""
