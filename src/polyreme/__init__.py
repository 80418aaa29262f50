"""polyreme: train a model on whatever machines there are, and get more out of them."""

__version__ = "0.1.0"
