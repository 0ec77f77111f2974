"""How many answers share the device, and how they take turns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from redrafter_mlx.checks import check_int, make_plain
from redrafter_mlx.errors import BadInputError


@dataclass(frozen=True)
class EngineOptions:
    """Limits of the engine of one model.

    max_batch:    maximum number of answers decoded at the same time; further ones wait
    prefix_bytes: limit of the cache of earlier texts, for prompts that share a prefix with one;
                  a longer text is not kept; None is a share of the memory
    memory_bytes: limit of all that MLX holds in this process, other models too; None is the
                  machine's own
    cache_dir:    folder that keeps those texts' caches when the process has ended, and the texts
                  that drafts are copied from; None keeps none
    cache_bytes:  limit of that folder; None is a tenth of the disk's free room
    """

    max_batch: int = 8
    prefix_bytes: int | None = None
    memory_bytes: int | None = None
    cache_dir: Path | None = None
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        check_int("max_batch", self.max_batch, 1, 256)
        if self.prefix_bytes is not None:
            check_int("prefix_bytes", self.prefix_bytes, 0, None)
        if self.memory_bytes is not None:
            check_int("memory_bytes", self.memory_bytes, 1, None)
        if self.cache_dir is not None:
            object.__setattr__(self, "cache_dir", Path(self.cache_dir).expanduser())
        if self.cache_bytes is not None:
            check_int("cache_bytes", self.cache_bytes, 1, None)
            if self.cache_dir is None:
                raise BadInputError("cache_bytes limits cache_dir; give that, too")
