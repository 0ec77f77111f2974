"""Measurements that are programs of their own: `python -m redrafter_mlx.bench.programs.NAME`."""
