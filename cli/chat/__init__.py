"""`redrafter-mlx chat`."""
