"""Weight files on disk: their names and tensors."""
