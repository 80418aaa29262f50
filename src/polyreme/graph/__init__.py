"""Models as graphs of layers."""
