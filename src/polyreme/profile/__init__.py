"""Costs of layers and collectives, measured or assumed."""
