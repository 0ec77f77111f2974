"""Names and tensors of files on disk."""
