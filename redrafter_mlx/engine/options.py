"""How many answers share the device, and how they take turns."""

from __future__ import annotations

from dataclasses import dataclass

from redrafter_mlx.config import check_int, check_number


@dataclass(frozen=True)
class EngineOptions:
    """Limits of the engine of one model.

    max_batch:       answers that are decoded at the same time; further ones wait
    prefill_seconds: how long running answers wait, at most, while a prompt is read
    prefix_bytes:    of prompts and answers kept for later prompts that begin alike; None is a share
                     of the memory
    memory_bytes:    for weights, caches and work together; None is what the machine has for it
    """

    max_batch: int = 8
    prefill_seconds: float = 0.25
    prefix_bytes: int | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        check_int("max_batch", self.max_batch, 1, 256)
        check_number("prefill_seconds", self.prefill_seconds, low=0.0, low_excluded=True)
        for name in ("prefix_bytes", "memory_bytes"):
            value: int | None = getattr(self, name)
            if value is not None:
                check_int(name, value, 0, None)
