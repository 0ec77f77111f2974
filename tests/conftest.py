"""Imports the package before any test imports MLX, so that the optimised BLAS answers."""

import redrafter_mlx  # noqa: F401
