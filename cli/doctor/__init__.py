"""`redrafter-mlx doctor`."""
