"""Memory that the engines of one thread share: kept texts give way to the answers of all models."""

from __future__ import annotations

from typing import Protocol
from weakref import ref

import mlx.core as mx

from redrafter_mlx.decoding.cache.prefix_cache import PrefixCache


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
