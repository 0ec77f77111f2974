"""`redrafter-mlx learn`: the drafter learns from the answers that were kept on this machine."""
