"""Admission by bytes: an answer that begins must fit, as a failed allocation cannot be reported."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from redrafter_mlx.decoding.prefix_cache import PrefixCache
from redrafter_mlx.decoding.sequence_cache import SequenceCache
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.engine.request import Request
from redrafter_mlx.errors import BusyError
from redrafter_mlx.runtime.device import memory_limit
from redrafter_mlx.target.cache_slots import round_up
from redrafter_mlx.target.fingerprint import nbytes_of
from redrafter_mlx.target.kv_cache import CAPACITY_STEP, TreeCache
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
        given = options.memory_bytes
        self._limit = memory_limit() if given is None else given
        self._work = 8 * _NODES * target.vocab_size
        free = max(self._limit - nbytes_of(target.model), 0)
        given = options.prefix_bytes
        self.prefix_bytes = free // _PREFIX_SHARE if given is None else given
        self._slot = _slot_bytes(target)  # until an answer's cache, its drafter's too, was measured

    def learn(self, cache: SequenceCache) -> None:
        """Measure the bytes of a cache slot in one sequence's cache."""
        self._slot = cache.nbytes / max(cache.target.capacity, 1)

    def has_room(
        self, request: Request, others: Sequence[Request], unread: int, prefixes: PrefixCache
    ) -> bool:
        """Whether an answer can begin now; cached prefixes are dropped to make room.

        A batch is copied when a row joins it, and all its rows are as long as the longest.

        Args:
          others: requests that run or whose prompts are being read
          unread: number of the last of these that hold nothing yet, or not all
        """
        each = [self._slots(one) for one in (*others, request)]
        joined = max(each) * len(each) if others else 0
        slots = each[-1] + joined + sum(each[len(others) - unread : len(others)])
        needed = int(self._slot * slots) + self._work * len(each)
        return self.make_room(needed, prefixes)

    def make_room(self, needed: int, prefixes: PrefixCache) -> bool:
        """Drop cached prefixes until `needed` bytes are free; False if that is not enough."""
        excess = mx.get_active_memory() + needed - self._limit
        if excess > 0 and prefixes.nbytes:
            prefixes.shrink(max(prefixes.nbytes - excess, 0))
            excess = mx.get_active_memory() + needed - self._limit
        return excess <= 0

    def too_large(self, request: Request) -> BusyError:
        """Return the error for an answer that does not fit even if nothing else runs."""
        needed, used = int(self._slot * self._slots(request)) + self._work, mx.get_active_memory()
        return BusyError(
            f"a prompt of {len(request.prompt)} tokens needs {needed / 1e9:.2f} GB, and of the "
            f"{self._limit / 1e9:.2f} GB that MLX may take in this process {used / 1e9:.2f} are "
            f"taken; shorten it, or free memory"
        )

    def _slots(self, request: Request) -> int:
        """Return the number of cache slots to reserve for a request."""
        tokens = len(request.prompt) + min(request.options.max_tokens, _EXPECTED) + _NODES
        return round_up(tokens, CAPACITY_STEP)


def _slot_bytes(target: Target) -> float:
    """Return the bytes of a slot of the target's cache, from the shapes of a call: none is run."""
    cache = TreeCache(target.n_layers)
    cache.plan_prompt(0, 1)
    target.hidden(mx.array([[0]]), cache.layers)
    return cache.nbytes / cache.capacity
