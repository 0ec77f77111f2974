"""The target as rank 0 calls it: every call is announced to the other ranks, which repeat it.

Rank 0 alone drafts, samples, accepts and schedules. The others keep no text: each command names the
tokens of one call and the cache, by a number that rank 0 gave it. So ranks cannot reach different
decisions, however their sums are rounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import cast
from weakref import WeakKeyDictionary, WeakSet

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from redrafter_mlx.config import WHOLE, KVQuantization
from redrafter_mlx.distributed.commands import CommandWriter, Made, Origin, Stored, Word
from redrafter_mlx.distributed.group import Ranks
from redrafter_mlx.distributed.plain_batch import PlainBatch
from redrafter_mlx.distributed.sharding import Sharing
from redrafter_mlx.errors import MismatchError
from redrafter_mlx.speculation.tree import TokenTree
from redrafter_mlx.target_model.cache.kv_cache import Snapshot, TreeCache
from redrafter_mlx.target_model.cache.packed_cache import Packing
from redrafter_mlx.target_model.cache.plain import are_quantised, compute_with, positions_of
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.recurrent.state_cache import Recurrences, States


class Mirror:
    """Announces rank 0's calls to the other ranks.

    last: result of the previous call; the next command is sent after it, even if the calls are
          computed in different threads and streams
    """

    def __init__(self, ranks: Ranks, sharing: Sharing = "tensor") -> None:
        self.ranks, self.sharing = ranks, sharing
        self.last = mx.zeros(())
        mx.eval(self.last)  # in this thread: another one cannot
        self._numbers = itertools.count(1)
        self._live: WeakSet[Stored] = WeakSet()

    def announce(
        self, word: Word, writer: CommandWriter, **fields: object
    ) -> tuple[mx.array, Stored]:
        """Announce a call; return an array that it must depend on, and the cache that it leaves.

        The other ranks drop the caches that nothing refers to here.
        """
        stored = Stored(next(self._numbers))
        live = sorted(each.number for each in self._live)
        self._live.add(stored)
        named = {"number": stored.number, "live": live, **fields}
        sent = writer.send(self.ranks, self.last, word, named)
        if self.sharing == "pipeline":  # its ranks receive without waiting for the command
            mx.eval(sent)
        return sent, stored

    def keep(self, origin: Origin) -> Stored:
        """Have all ranks compute a cache now, so that they need not hold its origin."""
        writer = CommandWriter()
        sent, stored = self.announce("keep", writer, origin=writer.origin(origin))
        mx.async_eval(sent)
        self.last = sent
        return stored

    def run(
        self, batch: PlainBatch, model: nn.Module, stream: mx.Stream | mx.ThreadLocalStream
    ) -> Iterator[tuple[int, int]]:
        """Have all ranks run mlx-lm's own batch on the model; see PlainBatch.run."""
        sent, _ = self.announce("batch", CommandWriter(), batch=asdict(batch))
        mx.eval(sent)
        self.last = yield from batch.run(model, stream, self.ranks)


@dataclass(frozen=True)
class _MirroredSnapshot(Snapshot):
    origin: Origin
    last: mx.array


class MirroredCache(TreeCache):
    """A cache that records the origin of its contents; see TreeCache."""

    has_checkpoints = False

    def __init__(
        self,
        n_layers: int,
        states: Mapping[int, Recurrences],
        windows: Mapping[int, int],
        mirror: Mirror,
        origin: Origin,
        packing: Packing | None = None,
    ) -> None:
        super().__init__(n_layers, states, windows, packing=packing)
        self._mirror = mirror
        self.origin = origin

    def called(self, hidden: mx.array, stored: Stored) -> None:
        """Record a call, and make the buffers depend on all of it.

        Otherwise rank 0 could skip sums of the last layer, for which other ranks would wait.
        """
        self.layers[-1].after(hidden)
        self.origin, self._mirror.last = stored, hidden

    def flush(self) -> None:
        if self.pending is not None:
            arrays = (self.pending.path, self.pending.n_accepted, self.pending.length)
            self.origin = Made("flush", (self.origin,), arrays)
        super().flush()

    def take(self, index: mx.array, slots: int | None = None) -> MirroredCache:
        taken = super().take(index, slots)  # flushes this cache
        return self._copied(taken, Made("take", (self._kept(),), (index,), slots=slots))

    @classmethod
    def joined(cls, caches: Sequence[TreeCache]) -> MirroredCache:
        mine = cast("Sequence[MirroredCache]", caches)
        whole = TreeCache.joined(caches)  # flushes them
        return mine[0]._with(whole, Made("join", tuple(each.origin for each in mine)))

    def shared(self, slots: int, states: States | None = None, dropped: int = 0) -> MirroredCache:
        assert states is None, "other ranks have no checkpoints"
        shared = super().shared(slots, dropped=dropped)
        return self._copied(shared, Made("share", (self._kept(),), slots=slots))

    def trim(self, slots: int) -> None:
        super().trim(slots)  # flushes
        self.origin = self._mirror.keep(Made("trim", (self.origin,), slots=slots))

    def snapshot(self) -> Snapshot:
        return _MirroredSnapshot(self.layer_buffers, self.pending, self.origin, self._mirror.last)

    def restore(self, before: Snapshot) -> None:
        assert isinstance(before, _MirroredSnapshot)
        super().restore(before)
        self.origin, self._mirror.last = before.origin, before.last

    def _kept(self) -> Stored:
        """Return this cache as the other ranks have it, which compute it now if they do not."""
        if not isinstance(self.origin, Stored):
            self.origin = self._mirror.keep(self.origin)
        return self.origin

    def _copied(self, cache: TreeCache, origin: Origin) -> MirroredCache:
        """Return a copy that all ranks make now, before the next call changes this cache."""
        return self._with(cache, self._mirror.keep(origin))

    def _with(self, cache: TreeCache, origin: Origin) -> MirroredCache:
        whole = MirroredCache(
            len(self.layers), self.states, self.windows, self._mirror, origin, self.packing
        )
        whole.layer_buffers, whole.excess = cache.layer_buffers, cache.excess
        return whole


class MirroredTarget(Target):
    """A target whose calls all ranks make; see Target."""

    def __init__(self, model: nn.Module, mirror: Mirror, *, kv: KVQuantization = WHOLE) -> None:
        super().__init__(model, **vars(kv))
        self._mirror = mirror
        self.plain = MirroredModel(self.model, mirror)
        self.builds_ahead, self.submits_ahead = mirror.sharing == "tensor", False
        self.has_all_keys = False

    def reading(self, layers: Sequence[int]) -> Target:
        if layers and self._mirror.sharing == "pipeline":
            raise MismatchError(
                f"the drafter reads layers of {self.model_type}, some of which other ranks hold; "
                f"give another --drafter, such as lookup, or another number of ranks"
            )
        return super().reading(layers)

    def new_cache(self, *, whole: bool = False) -> MirroredCache:
        assert not whole, "other ranks keep windows"
        origin = Made("unpacked" if self.packing is None else "new")
        return MirroredCache(
            self.n_caches, self.states, self.windows, self._mirror, origin, self.packing
        )

    def append(self, tokens: mx.array, cache: TreeCache, start: int, length: int = 0) -> mx.array:
        assert isinstance(cache, MirroredCache)
        writer = CommandWriter()
        origin = writer.origin(cache.origin)
        sent, stored = self._mirror.announce(
            "append", writer, origin=origin, start=start, length=length,
            tokens=writer.array(tokens),
        )  # fmt: skip
        hidden = super().append(mx.depends(tokens, sent), cache, start, length)
        cache.called(hidden, stored)
        return hidden

    def verify(
        self,
        tree: TokenTree,
        cache: TreeCache,
        length: mx.array,
        bound: int,
        compiled: bool = True,
    ) -> tuple[mx.array, mx.array]:
        assert isinstance(cache, MirroredCache)
        writer, pending = CommandWriter(), cache.pending
        moved = () if pending is None else (pending.path, pending.n_accepted, pending.length)
        sent, stored = self._mirror.announce(
            "verify",
            writer,
            origin=writer.origin(cache.origin),
            pending=[writer.array(array) for array in moved],
            tree=[writer.array(a) for a in (tree.tokens, tree.depths, tree.mask)],
            is_chain=tree.is_chain,
            max_depth=tree.max_depth,
            length=writer.array(length),
            bound=bound,
            compiled=compiled,
        )
        after_it = tree._replace(tokens=mx.depends(tree.tokens, sent))
        hidden, logits = super().verify(after_it, cache, length, bound, compiled)
        cache.called(hidden, stored)
        return hidden, logits


def target_of(model: nn.Module, mirror: Mirror | None, kv: KVQuantization = WHOLE) -> Target:
    """Return the target of a model that this process has alone, or shares with other ranks."""
    if mirror is None:
        return Target(model, **vars(kv))
    return MirroredTarget(model, mirror, kv=kv)


class MirroredModel(nn.Module):
    """mlx-lm's own model, for its own loops and caches; all ranks make its calls."""

    def __init__(self, model: nn.Module, mirror: Mirror) -> None:
        super().__init__()
        self.model = model
        self._mirror = mirror
        self._caches: WeakKeyDictionary[object, Stored] = WeakKeyDictionary()

    @property
    def layers(self) -> Sequence[nn.Module]:
        return cast("Sequence[nn.Module]", self.model.layers)

    def make_cache(self) -> list[KVCache]:
        """Return empty caches: those of the model, of which some may hold a state."""
        return cast("list[KVCache]", make_prompt_cache(self.model))

    def __call__(self, tokens: mx.array, cache: Sequence[KVCache] | None = None) -> mx.array:
        writer = CommandWriter()
        first = None if cache is None else cache[0]
        before = None if first is None else self._caches.get(first)
        sent, stored = self._mirror.announce(
            "plain",
            writer,
            before=None if before is None else before.number,
            offset=positions_of(cache or ()),
            quantised=cache is not None and are_quantised(cache),
            tokens=writer.array(tokens),
        )
        logits: mx.array = self.model(mx.depends(tokens, sent), cache=cache)
        self._mirror.last = logits
        if cache is not None:
            self._caches[cache[0]] = stored
            compute_with(cache[-1], logits)  # see MirroredCache.called
        return logits
