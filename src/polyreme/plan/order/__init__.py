"""Orders of a pipeline's actions, one generator a file."""
