"""`redrafter-mlx bench`."""
