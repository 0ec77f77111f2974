"""ReDrafter on MLX: exact speculative decoding (Zhang et al., arXiv 2403.09919).

    import redrafter_mlx
    model = redrafter_mlx.load()
    for response in model.stream("Why is the sky blue?"):
        print(response.text, end="", flush=True)

On Linux, importing the package loads an optimised BLAS and sets glibc's allocator; nothing else.
MLX itself is imported with the first name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from redrafter_mlx.cpu.blas import BLAS
from redrafter_mlx.cpu.malloc import keep_freed_memory
from redrafter_mlx.cpu.threads import THREADS
from redrafter_mlx.version import __version__ as __version__

if TYPE_CHECKING:
    from redrafter_mlx.config import BeamShape, GenerationOptions, SamplingParams
    from redrafter_mlx.drafting.draft_model import DraftModel
    from redrafter_mlx.drafting.interface import Drafter
    from redrafter_mlx.drafting.recurrent_config import DrafterConfig
    from redrafter_mlx.engine.drop_in import stream_generate
    from redrafter_mlx.engine.engine import Redrafter
    from redrafter_mlx.engine.options import EngineOptions
    from redrafter_mlx.engine.session import Session
    from redrafter_mlx.errors import RedrafterError
    from redrafter_mlx.loading.load import load
    from redrafter_mlx.response import Completion, Response
    from redrafter_mlx.verification import VerificationReport, verify

_HOME = {
    "BeamShape": "config",
    "GenerationOptions": "config",
    "SamplingParams": "config",
    "DraftModel": "drafting.draft_model",
    "Drafter": "drafting.interface",
    "DrafterConfig": "drafting.recurrent_config",
    "EngineOptions": "engine.options",
    "RedrafterError": "errors",
    "Completion": "response",
    "Redrafter": "engine.engine",
    "Response": "response",
    "Session": "engine.session",
    "stream_generate": "engine.drop_in",
    "load": "loading.load",
    "VerificationReport": "verification",
    "verify": "verification",
}

__all__ = [
    "BLAS",
    "BeamShape",
    "Completion",
    "DraftModel",
    "Drafter",
    "DrafterConfig",
    "EngineOptions",
    "GenerationOptions",
    "Redrafter",
    "RedrafterError",
    "Response",
    "SamplingParams",
    "Session",
    "VerificationReport",
    "load",
    "stream_generate",
    "verify",
]

keep_freed_memory()
THREADS.use_all_cores()


def __getattr__(name: str) -> object:
    """Import the module that holds `name` at its first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
