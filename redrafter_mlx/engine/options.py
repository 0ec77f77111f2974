"""How many answers share the device, and how they take turns."""

from __future__ import annotations

from dataclasses import dataclass

from redrafter_mlx.config import check_int
from redrafter_mlx.runtime.plain import make_plain


@dataclass(frozen=True)
class EngineOptions:
    """Limits of the engine of one model.

    max_batch:    maximum number of answers decoded at the same time; further ones wait
    prefix_bytes: limit of the cache of earlier texts, for prompts that share a prefix with one;
                  a longer text is not kept; None is a share of the memory
    memory_bytes: limit of all that MLX holds in this process, other models too; None is the
                  machine's own
    """

    max_batch: int = 8
    prefix_bytes: int | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        check_int("max_batch", self.max_batch, 1, 256)
        if self.prefix_bytes is not None:
            check_int("prefix_bytes", self.prefix_bytes, 0, None)
        if self.memory_bytes is not None:
            check_int("memory_bytes", self.memory_bytes, 1, None)
