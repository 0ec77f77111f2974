"""Memory: what the answers of an engine may use, and what the engines of one thread share.

An answer that begins must fit, as a failed allocation cannot be reported. Kept texts give way to
the answers of all models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import ref

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.decoding.cache.prefix_cache import PrefixCache
from redrafter_mlx.decoding.cache.sequence_cache import SequenceCache
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.engine.request import Request
from redrafter_mlx.errors import BadInputError, BusyError
from redrafter_mlx.runtime.device import memory_limit
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.cache.slots import planned_capacity
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.target_model.model import Target

_EXPECTED = 256
"""Maximum number of answer tokens to reserve memory for; few answers reach their limit."""

_NODES = 32
"""Nodes assumed per tree; several copies of their logits are held while tokens are chosen."""

_KEPT_SHARE = 16
"""One part in this many of that memory is reserved, at most, for ended texts on the host."""

_PREFIX_SHARE = 2
"""One part in this many of the memory that the weights leave free is for the prefix cache, which
shrinks when answers need it."""


_DEQUANTISED = 2
"""Layers of a quantised cache that are in memory dequantised: MLX begins one before it frees the
one before."""

_CHECKPOINTS = 2
"""States, and windows, that are kept while an answer is generated besides the current one."""


class MemoryBudget:
    """The memory that the answers of one model may use together.

    limit, weights: bytes that MLX may hold, and those of the weights
    work, slot: bytes of a sequence's work in a step, and of one of its cache slots, with what is
                dequantised of it in a call; the most so far
    prefix_bytes: limit of the prefix cache
    host_bytes:   maximum size of what the host keeps of ended texts
    pool: what it shares with the other engines of its thread
    """

    def __init__(
        self,
        target: Target,
        options: EngineOptions,
        modules: Sequence[nn.Module] = (),
        *,
        host_bytes: int = 0,
        kept_bytes: int = 0,
        pool: MemoryPool | None = None,
    ) -> None:
        """Reserve for the weights of `modules`, which the drafter drafts with, and the target's.

        host_bytes: what the host keeps for each token of a text, such as an index of n-grams
        kept_bytes: what it keeps of texts that have ended
        """
        given = options.memory_bytes
        self.limit = memory_limit() if given is None else given
        self.pool = pool or MemoryPool()
        self.work = 8 * _NODES * target.vocab_size
        self.weights = sum(map(nbytes_of, (target.model, *modules)))
        free = max(self.limit - self.weights, 0)
        self.host_bytes = min(kept_bytes, free // _KEPT_SHARE)
        given = options.prefix_bytes
        self.prefix_bytes = free // _PREFIX_SHARE if given is None else given
        self.slot, self._state = 1.0, 0  # until a drafter's memory was measured too
        self._rings: dict[int, int] = {}
        self._measure(_one_slot(target))
        self._host = host_bytes

    def fits(self, requests: Sequence[Request], nodes: int) -> bool:
        """Whether all these answers fit at once, with trees of so many nodes, if none runs now."""
        more = max(nodes - _NODES, 0)
        slots = [self.slots(request) + more for request in requests]
        work = self.work * more * len(requests) // _NODES
        return self.excess(self.needed(slots[0], slots[1:]) + work) <= 0

    @property
    def max_prompt(self) -> int:
        """Number of tokens beyond which no prompt fits, whatever else runs."""
        return max(int((self.limit - self.weights) / self.slot), 0)

    def learn(self, cache: SequenceCache) -> None:
        """Measure the bytes of a cache slot, of windows and of states, in one sequence's cache.

        The largest seen counts: an answer without drafts has no drafter's memory, and the next one
        may have it.
        """
        drafters = cache.nbytes - cache.target.nbytes
        self._measure(cache.target, drafters)

    def _measure(self, cache: TreeCache, drafters: int = 0) -> None:
        fixed = sum(a.nbytes for layer in cache.forgetful for a in layer.arrays)
        slots = cache.nbytes - fixed + drafters
        slot = slots / max(cache.capacity, 1) + _DEQUANTISED * cache.unpacked_slot_bytes
        self.slot = max(self.slot, slot)
        self._state = max(self._state, cache.state_bytes)
        self._rings = {**self._rings, **cache.ring_bytes}

    def _fixed(self, slots: int) -> int:
        """Return the bytes of a sequence's states and windows, after so many slots."""
        windows = sum(nbytes * min(slots, ring) for ring, nbytes in self._rings.items())
        return self._state + windows

    def slots(self, request: Request, committed: int = 0) -> int:
        """Return the cache slots to reserve for a request, of which `committed` tokens are read."""
        expected = len(request.prompt) + min(request.options.max_tokens, _EXPECTED)
        return planned_capacity(max(expected, committed), _NODES)

    def needed(self, slots: int, others: Sequence[int] = (), unread: int = 0) -> int:
        """Return the bytes that must be free for an answer of so many slots to begin.

        A batch is copied when a row joins it, and all its rows are as long as the longest.

        Args:
          others: slots of the answers that run or whose prompts are being read
          unread: number of the last of these that hold nothing yet, or not all
        """
        joined = max(slots, *others) * (len(others) + 1) if others else 0
        total = slots + joined + sum(others[len(others) - unread :])
        host = self._host * (slots + sum(others))  # none of it is in MLX's memory
        states = 1 + (len(others) + 1 if others else 0) + unread
        states += _CHECKPOINTS * (len(others) + 1)
        fixed = self._fixed(max(slots, *others) if others else slots) * states
        return int(self.slot * total) + fixed + host + self.work * (len(others) + 1)

    def excess(self, needed: int) -> int:
        """Return how many bytes too few are free; 0 or less if `needed` bytes are free."""
        host = max(self.host_bytes, self.pool.host_bytes)  # of all models in memory
        return mx.get_active_memory() + host + needed - self.limit

    def make_room(self, needed: int, prefixes: PrefixCache) -> bool:
        """Drop cached prefixes until `needed` bytes are free; False if that is not enough.

        Those of other models are dropped first. What is reserved for a model that is being loaded
        is not free.
        """
        return self._drop_until_free(needed + self.pool.reserved, prefixes)

    def can_grow(self, slots: int, prefixes: PrefixCache) -> bool:
        """Whether running answers can have so many more slots; drops prefixes like `make_room`."""
        return self._drop_until_free(int((self.slot + self._host) * slots), prefixes)

    def _drop_until_free(self, needed: int, prefixes: PrefixCache) -> bool:
        if (excess := self.excess(needed)) > 0:
            self.pool.drop(excess, prefixes)
            excess = self.excess(needed)
        return excess <= 0

    def refusal(self, request: Request) -> BadInputError | None:
        """Return the error for an answer that would not fit beside the weights alone, else None."""
        return self._refusal(f"{len(request.prompt)}", self.needed(self.slots(request)))

    def refusal_of_length(self, tokens: int) -> BadInputError | None:
        """Return the error for a prompt of `tokens` or more that never fits, else None."""
        return self._refusal(f"at least {tokens}", int(self.slot * tokens) + self._fixed(tokens))

    def _refusal(self, tokens: str, needed: int) -> BadInputError | None:
        if self.weights + needed <= self.limit:
            return None
        return BadInputError(
            f"a prompt of {tokens} tokens needs {needed / 1e9:.2f} GB and the weights "
            f"{self.weights / 1e9:.2f}, but MLX may take {self.limit / 1e9:.2f} GB in this "
            f"process; shorten it, or load a smaller model"
        )

    def busy(self, request: Request) -> BusyError:
        """Return the error for an answer that does not fit now, though nothing else runs."""
        needed, used = self.needed(self.slots(request)), mx.get_active_memory()
        return BusyError(
            f"a prompt of {len(request.prompt)} tokens needs {needed / 1e9:.2f} GB, and of the "
            f"{self.limit / 1e9:.2f} GB that MLX may take in this process {used / 1e9:.2f} are "
            f"taken; shorten it, or free memory (another model in this process keeps texts that it "
            f"has read: EngineOptions(prefix_bytes=...) limits them, close() frees them)"
        )


def _one_slot(target: Target) -> TreeCache:
    """Return a cache after a call, for its shapes: nothing is computed."""
    cache = Target.new_cache(target)  # which no other rank is told of
    cache.plan_prompt(0, 1)
    target.hidden(mx.array([[0]]), cache.layers)
    return cache


class Reserving(Protocol):
    """A member's budget; host_bytes: maximum size of what the host keeps of its ended texts."""

    host_bytes: int


class Member(Protocol):
    """What schedules the answers of one engine.

    running: number of answers that were admitted and are not over
    kept:    texts that it keeps for later prompts
    memory:  what it may use
    """

    @property
    def running(self) -> int: ...

    @property
    def kept(self) -> PrefixCache: ...

    @property
    def memory(self) -> Reserving: ...


class MemoryPool:
    """The engines of a thread, which share a memory limit. The thread alone drops their texts.

    reserved: bytes for a model that is being loaded, in which no answer begins
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._members: list[ref[Member]] = []

    @property
    def members(self) -> list[Member]:
        """The members that exist still, in the order in which they came."""
        return [member for one in self._members if (member := one()) is not None]

    @property
    def kept_bytes(self) -> int:
        """Size of all kept texts."""
        return sum(member.kept.nbytes for member in self.members)

    @property
    def host_bytes(self) -> int:
        """Size of what the host keeps of ended texts, of all members together."""
        return sum(member.memory.host_bytes for member in self.members)

    def add(self, new: Member) -> None:
        """Add a member, for as long as it exists."""
        self._members = [*map(ref, self.members), ref(new)]

    def may_free(self, member: Member) -> bool:
        """Whether memory will be free without a member's doing: others' answers run, or a load."""
        others = [other for other in self.members if other is not member]
        return self.reserved > 0 or any(other.running for other in others)

    def drop(self, nbytes: int, own: PrefixCache | None = None) -> None:
        """Drop texts of at least so many bytes, as far as there are any; those in `own` last."""
        kept = [member.kept for member in self.members if member.kept is not own]
        kept.sort(key=lambda cache: cache.nbytes, reverse=True)
        for cache in [*kept, *([] if own is None else [own])]:
            before = cache.nbytes
            if nbytes > 0 and before:
                cache.shrink(max(before - nbytes, 0))
                nbytes -= before - cache.nbytes

    def make_room(self, nbytes: int, limit: int) -> bool:
        """Drop texts until MLX holds so many bytes less than `limit`; False if that is not enough.

        What is dropped is returned to the system.
        """
        needed = self.host_bytes + nbytes
        self.drop(mx.get_active_memory() + needed - limit)
        mx.clear_cache()
        return mx.get_active_memory() + needed <= limit
