"""Measurements of plain and drafted decoding: `run(BenchOptions(...))` returns a `Result`."""

import importlib

_HOME = {"BenchOptions": "options", "Result": "analyse.result", "run": "session"}

__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    """Import the module that holds `name` at its first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
