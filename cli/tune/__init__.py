"""`redrafter-mlx tune`."""
