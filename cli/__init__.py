"""The commands, and what a person sees of them; typer and rich stop here.

Modules import MLX and what is built on it only inside commands, so that `--help` is quick.
"""
