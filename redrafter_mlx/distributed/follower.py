"""Ranks other than 0: they repeat rank 0's calls of the target until rank 0 ends."""

from __future__ import annotations

from functools import cached_property
from typing import NoReturn

import mlx.core as mx
from mlx_lm.models.cache import KVCache, trim_prompt_cache

from redrafter_mlx.cpu.door import threads_by_rows
from redrafter_mlx.distributed.collectives import sums
from redrafter_mlx.distributed.commands import Command, Fields, receive
from redrafter_mlx.distributed.group import Ranks
from redrafter_mlx.distributed.plain_batch import PlainBatch
from redrafter_mlx.runtime.awake import kept_awake
from redrafter_mlx.runtime.processes.launched import wait_for_loss
from redrafter_mlx.speculation.tree import TokenTree
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.cache.plain import plain_caches, positions_of
from redrafter_mlx.target_model.cache.slots import Pending
from redrafter_mlx.target_model.model import Target


def follow(target: Target, ranks: Ranks) -> NoReturn:
    """Repeat rank 0's calls; the process ends when rank 0's does."""
    follower = Follower(target, ranks)
    with target.in_use(), kept_awake():
        while True:
            try:
                follower.repeat(receive(ranks))
            except RuntimeError:
                wait_for_loss()
                raise


class Follower:
    """Repeats calls on one rank, whose caches have rank 0's numbers."""

    def __init__(self, target: Target, ranks: Ranks) -> None:
        self._target, self._ranks = target, ranks
        self._caches: dict[int, TreeCache] = {}
        self._plain: dict[int, list[KVCache]] = {}

    @cached_property
    def _unpacked(self) -> Target:
        """The target with caches that quantise nothing, on which rank 0 checks the model."""
        return self._target if self._target.packing is None else Target(self._target.model)

    def repeat(self, command: Command) -> None:
        """Make one call, and compute all of it: the other ranks wait for its sums."""
        fields = command.fields
        if command.word == "plain":
            self._call_plainly(command)
        elif command.word == "batch":
            stream = mx.default_stream(mx.default_device())
            for _ in PlainBatch(**fields["batch"]).run(self._target.model, stream, self._ranks):
                pass
        elif command.word == "sums":
            form = (1, fields["rows"], self._target.hidden_size)
            mx.eval(sums(self._ranks, mx.zeros(form, self._target.dtype), fields["count"]))
        else:
            with threads_by_rows():  # mlx-lm's own calls use all cores
                self._call(command)

    def _call(self, command: Command) -> None:
        fields, arrays = command.fields, command.arrays
        cache = self._cache(fields["origin"], command)
        target = self._unpacked if cache.packing is None else self._target
        hidden = None
        if command.word == "append":
            hidden = target.append(
                arrays[fields["tokens"]], cache, fields["start"], fields["length"]
            )
        elif command.word == "verify":
            tokens, depths, mask = (arrays[i] for i in fields["tree"])
            if fields["pending"]:
                cache.pending = Pending(*(arrays[i] for i in fields["pending"]))
            tree = TokenTree(tokens, depths, depths, depths, mask, fields["max_depth"],
                             fields["is_chain"])  # fmt: skip
            hidden, _ = target.verify(
                tree, cache, arrays[fields["length"]], fields["bound"], fields["compiled"]
            )
            cache.pending = None
        number, live = fields["number"], set(fields["live"])
        self._caches = {
            n: c for n, c in self._caches.items() if (n in live or n > number) and c is not cache
        }
        self._caches[number] = cache
        mx.eval(cache.buffers, [] if hidden is None else hidden)

    def _call_plainly(self, command: Command) -> None:
        fields = command.fields
        live = {*fields["live"]}
        packing = self._target.packing if fields["quantised"] else None
        caches = self._plain.get(fields["before"]) or plain_caches(self._target.model, packing)
        trim_prompt_cache(caches, positions_of(caches) - fields["offset"])
        self._plain = {n: c for n, c in self._plain.items() if n in live and c is not caches}
        self._plain[fields["number"]] = caches
        mx.eval(self._target.model(command.arrays[fields["tokens"]], cache=caches))

    def _cache(self, origin: int | Fields, command: Command) -> TreeCache:
        """Return the cache with the origin that rank 0 names."""
        if isinstance(origin, int):
            return self._caches[origin]
        of = [self._cache(each, command) for each in origin["of"]]
        arrays = [command.arrays[i] for i in origin["arrays"]]
        how = origin["how"]
        if how == "new":
            return self._target.new_cache()
        if how == "unpacked":
            return self._unpacked.new_cache()
        if how == "flush":
            of[0].pending = Pending(*arrays)
            of[0].flush()
            return of[0]
        if how == "take":
            return of[0].take(arrays[0], origin["slots"])
        if how == "join":
            return TreeCache.joined(of)
        if how == "share":
            return of[0].shared(origin["slots"])
        assert how == "trim"
        of[0].trim(origin["slots"])
        return of[0]
