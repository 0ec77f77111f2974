"""Admission by bytes: an answer that begins must fit, as a failed allocation cannot be reported."""

from __future__ import annotations

import mlx.core as mx

from redrafter_mlx.decoding.prefix_cache import PrefixCache
from redrafter_mlx.decoding.sequence_cache import SequenceCache
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.engine.request import Request
from redrafter_mlx.errors import BusyError
from redrafter_mlx.runtime.device import memory_limit
from redrafter_mlx.target.cache_slots import round_up
from redrafter_mlx.target.fingerprint import nbytes_of
from redrafter_mlx.target.kv_cache import CAPACITY_STEP
from redrafter_mlx.target.model import Target

_EXPECTED = 256
"""Maximum number of answer tokens to reserve memory for; few answers reach their limit."""

_NODES = 32
"""Nodes assumed per tree; several copies of their logits are held while tokens are chosen."""

_PREFIX_SHARE = 4
"""One part in this many of the memory that the weights leave free is for the prefix cache."""


class MemoryBudget:
    """The memory that the answers of one model may use together.

    prefix_bytes: limit of the prefix cache
    """

    def __init__(self, target: Target, options: EngineOptions) -> None:
        self._limit = options.memory_bytes or memory_limit()
        self._work = 8 * _NODES * target.vocab_size * (options.max_batch + 1)
        free = max(self._limit - nbytes_of(target.model), 0)
        given = options.prefix_bytes
        self.prefix_bytes = free // _PREFIX_SHARE if given is None else given
        self._slot = 0.0  # bytes of a cache slot, 0 until one was measured

    def learn(self, cache: SequenceCache) -> None:
        """Measure the bytes of a cache slot in one sequence's cache."""
        self._slot = cache.nbytes / max(cache.target.capacity, 1)

    def has_room(self, request: Request, largest_batch: int, prefixes: PrefixCache) -> bool:
        """Whether an answer can begin now; cached prefixes are dropped to make room.

        A batch of `largest_batch` bytes is copied when a row joins it.
        """
        return self.make_room(self._needed(request) + largest_batch + self._work, prefixes)

    def make_room(self, needed: int, prefixes: PrefixCache) -> bool:
        """Drop cached prefixes until `needed` bytes are free; False if that is not enough."""
        excess = mx.get_active_memory() + needed - self._limit
        if excess > 0 and prefixes.nbytes:
            prefixes.shrink(max(prefixes.nbytes - excess, 0))
            excess = mx.get_active_memory() + needed - self._limit
        return excess <= 0

    def too_large(self, request: Request) -> BusyError:
        """Return the error for an answer that does not fit even if nothing else runs."""
        needed, used = self._needed(request) + self._work, mx.get_active_memory()
        return BusyError(
            f"a prompt of {len(request.prompt)} tokens needs {needed / 1e9:.2f} GB, and of the "
            f"{self._limit / 1e9:.2f} GB for this model {used / 1e9:.2f} are taken; shorten it, or "
            f"free memory"
        )

    def _needed(self, request: Request) -> int:
        tokens = len(request.prompt) + min(request.options.max_tokens, _EXPECTED) + _NODES
        return int(self._slot * round_up(tokens, CAPACITY_STEP))
