"""How each family of transformers models is cut: one file where call signatures differ."""
