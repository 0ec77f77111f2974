"""ReDrafter on MLX: the target's own words, sooner (Zhang et al., arXiv 2403.09919).

    import redrafter_mlx
    model = redrafter_mlx.load()
    for response in model.stream("Why is the sky blue?"):
        print(response.text, end="", flush=True)

Importing the package loads an optimised BLAS on Linux CPUs and nothing else: MLX itself is
imported with the first name that needs it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from redrafter_mlx.blas import load_optimised_blas

__version__ = "0.1.0"

# In a checkout the folders cli, weights and bench stand beside this one, not in it as they are
# installed; Python started there finds this folder first.
_here = Path(__file__).resolve().parent
if not (_here / "weights").exists():
    __path__.append(str(_here.parent))

#: What answers the CPU's matrix products in this process; `redrafter-mlx doctor` prints it.
BLAS = load_optimised_blas()

if TYPE_CHECKING:
    from redrafter_mlx.config import BeamShape, GenerationOptions, SamplingParams
    from redrafter_mlx.drafter import Drafter
    from redrafter_mlx.drafter_config import DrafterConfig
    from redrafter_mlx.errors import RedrafterError
    from redrafter_mlx.generate import Redrafter, stream_generate
    from redrafter_mlx.loading import load
    from redrafter_mlx.receipt import Receipt, verify
    from redrafter_mlx.response import Completion, Response
    from redrafter_mlx.session import Session

_HOME = {
    "BeamShape": "config",
    "GenerationOptions": "config",
    "SamplingParams": "config",
    "Drafter": "drafter",
    "DrafterConfig": "drafter_config",
    "RedrafterError": "errors",
    "Completion": "response",
    "Redrafter": "generate",
    "Receipt": "receipt",
    "Response": "response",
    "Session": "session",
    "stream_generate": "generate",
    "load": "loading",
    "verify": "receipt",
}

__all__ = [
    "BLAS",
    "BeamShape",
    "Completion",
    "Drafter",
    "DrafterConfig",
    "GenerationOptions",
    "Receipt",
    "Redrafter",
    "RedrafterError",
    "Response",
    "SamplingParams",
    "Session",
    "load",
    "stream_generate",
    "verify",
]


def __getattr__(name: str) -> object:
    """Import the module that holds `name` when it is first asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
