"""`redrafter-mlx train`."""
