"""The commands and what they print; only cli uses typer, only cli and bench/show use rich.

MLX and the modules that need it are imported only inside commands, so that `--help` is quick.
"""
