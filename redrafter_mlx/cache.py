"""The target's keys and values, kept so that a tree of drafts can be verified and one path kept.

Every array operation here is lazy: lengths live on the device, and the host knows only an upper
bound of them. A step writes each buffer once, before attention reads it: the rows of the path
that the step before accepted, and behind them the rows of the new tree, in one slice update.
MLX updates in place only a buffer that nothing in flight still reads; a second write in the same
step, to compact the path at once, would copy every buffer whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from redrafter_mlx.accept import Acceptance
from redrafter_mlx.borrow import TargetRows, rows_of_text
from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.masks import attention_mask, chain_mask
from redrafter_mlx.rows import gather_rows, round_up, with_capacity, write_rows
from redrafter_mlx.tree import TokenTree

CAPACITY_STEP = 256
"""Buffers grow by this many rows, so that growing copies rarely."""

EXTENT_STEP = 32
"""Attention reads the buffers up to the length's bound, rounded up to this many rows or, in long
texts, to an eighth more: each extent is a trace of its own."""


@dataclass(frozen=True)
class PromptSpan:
    """A run of prompt tokens at host-known rows; the same slices and mask as mlx-lm's KVCache."""

    start: int
    count: int


@dataclass(frozen=True)
class TreePlan:
    """Where one tree's rows go and what they attend to.

    Shapes:
      offset:   [B] for a chain, else [B, N] int32: rotary positions
      mask:     [B, 1, N, extent] bool, [N, extent] if B = 1; True = may attend
      write_at: [B] int32, first row written
      gather:   [B, R] int32 over (previous tree's rows, this tree's rows), or None when the
                previous path lies in place already
      keep:     whether the step after may have to put this tree's rows in place
    """

    offset: mx.array
    mask: mx.array
    write_at: mx.array
    gather: mx.array | None
    extent: int
    capacity: int
    keep: bool


@dataclass(frozen=True)
class Pending:
    """An accepted path whose rows are still in tree order.

    Shapes:
      path:       [B, L] int32 nodes, root first
      n_accepted: [B] int32, drafts accepted (the root not counted)
      length:     [B] int32, committed length before the path
    """

    path: mx.array
    n_accepted: mx.array
    length: mx.array


LayerRows = tuple[mx.array | None, mx.array | None, mx.array | None, mx.array | None]
"""The buffers of one layer: keys, values, tree keys, tree values; see LayerCache."""


@dataclass(frozen=True)
class Snapshot:
    """The cache's references at one moment."""

    rows: Sequence[LayerRows]
    pending: Pending | None


@dataclass
class _Call:
    """What the next call does; all layers look here. (With a way back to their cache, it would be
    freed by the garbage collector alone, some time later.)"""

    plan: PromptSpan | TreePlan


class LayerCache:
    """One layer's buffers, behind the three names that an mlx-lm attention layer uses.

    Shapes:
      keys, values: [B, K, T, head size], rows below the committed length are valid
      tree_keys, tree_values: [B, K, N, head size], the last tree's rows in tree order; None
                     behind a chain, whose rows lie in place
    """

    def __init__(self, call: _Call) -> None:
        self._call = call
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.tree_keys: mx.array | None = None
        self.tree_values: mx.array | None = None

    @property
    def offset(self) -> int | mx.array:
        """The rotary position(s) of the rows of this call."""
        plan = self._call.plan
        return plan.start if isinstance(plan, PromptSpan) else plan.offset

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of this call, as mlx-lm's `create_attention_mask` asks for it."""
        if window_size is not None:
            raise UnsupportedModelError("sliding-window attention cannot verify a tree of drafts")
        plan = self._call.plan
        if isinstance(plan, TreePlan):
            return plan.mask
        if n == 1:
            return None
        if return_array:
            rows = mx.arange(plan.start, plan.start + n)[:, None]
            return rows >= mx.arange(plan.start + n)[None]
        return "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write this call's rows [B, K, n, head size] and return all that it may attend to."""
        plan = self._call.plan
        if isinstance(plan, PromptSpan):
            return self._append(plan, keys, values)
        self.keys = with_capacity(self.keys, keys, plan.capacity)
        self.values = with_capacity(self.values, values, plan.capacity)
        new_keys, new_values = keys, values
        if plan.gather is not None:
            assert self.tree_keys is not None
            assert self.tree_values is not None
            keys = gather_rows(mx.concatenate([self.tree_keys, keys], axis=2), plan.gather)
            values = gather_rows(mx.concatenate([self.tree_values, values], axis=2), plan.gather)
        self.tree_keys, self.tree_values = (new_keys, new_values) if plan.keep else (None, None)
        self.keys = write_rows(self.keys, keys, plan.write_at)
        self.values = write_rows(self.values, values, plan.write_at)
        return self.keys[:, :, : plan.extent], self.values[:, :, : plan.extent]

    def settle(self, pending: Pending) -> None:
        """Put the pending path's rows in place."""
        if self.keys is None or self.values is None or self.tree_keys is None:
            return
        assert self.tree_values is not None
        self.keys = write_rows(self.keys, gather_rows(self.tree_keys, pending.path), pending.length)
        self.values = write_rows(
            self.values, gather_rows(self.tree_values, pending.path), pending.length
        )

    def _append(
        self, plan: PromptSpan, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        end = plan.start + plan.count
        capacity = round_up(end, CAPACITY_STEP)
        self.keys = with_capacity(self.keys, keys, capacity)
        self.values = with_capacity(self.values, values, capacity)
        at = mx.array([plan.start])
        # Not `self.keys[...] = keys`: that changes the very array which a snapshot holds.
        self.keys = mx.slice_update(self.keys, keys, at, axes=(2,))
        self.values = mx.slice_update(self.values, values, at, axes=(2,))
        return self.keys[:, :, :end], self.values[:, :, :end]


class TreeCache:
    """The cache of one sequence batch, over all layers of a target."""

    def __init__(self, n_layers: int) -> None:
        self._call = _Call(PromptSpan(0, 0))
        self.layers = [LayerCache(self._call) for _ in range(n_layers)]
        self.pending: Pending | None = None

    @classmethod
    def of(cls, rows: Sequence[LayerRows], plan: TreePlan) -> TreeCache:
        """A cache of these rows, for one call."""
        cache = cls(len(rows))
        cache.rows, cache.plan = rows, plan
        return cache

    @property
    def rows(self) -> Sequence[LayerRows]:
        """The buffers of every layer."""
        return [(c.keys, c.values, c.tree_keys, c.tree_values) for c in self.layers]

    @rows.setter
    def rows(self, rows: Sequence[LayerRows]) -> None:
        for layer, held in zip(self.layers, rows, strict=True):
            layer.keys, layer.values, layer.tree_keys, layer.tree_values = held

    @property
    def plan(self) -> PromptSpan | TreePlan:
        """What the next call does."""
        return self._call.plan

    @plan.setter
    def plan(self, plan: PromptSpan | TreePlan) -> None:
        self._call.plan = plan

    def plan_prompt(self, start: int, count: int) -> None:
        """The next call appends `count` prompt rows at row `start`."""
        assert self.pending is None, "settle() first"
        self.plan = PromptSpan(start, count)

    def plan_tree(self, tree: TokenTree, length: mx.array, bound: int) -> None:
        """The next call verifies `tree` behind the committed `length` [B], at most `bound`."""
        N = tree.tokens.shape[1]
        extent = _extent(bound + N)
        slack = 0 if self.pending is None else self.pending.path.shape[1]
        capacity = round_up(extent + slack, CAPACITY_STEP)
        offset = length if tree.is_chain else length[:, None] + tree.depths
        write_at, gather = length, None
        if self.pending is not None:
            write_at = self.pending.length
            gather = _gather_index(self.pending, _tree_rows(self.layers[0]), N)
        if tree.is_chain:
            mask = chain_mask(length, N, extent)
        else:
            mask = attention_mask(tree.mask, length, extent)
        if mask.shape[0] == 1:
            mask = mask[0, 0]  # every attention of mlx-lm broadcasts a mask without batch axes
        self.plan = TreePlan(
            offset, mask, write_at, gather, extent, capacity, keep=not tree.is_chain
        )

    def commit(
        self, tree: TokenTree, path: mx.array, n_accepted: mx.array, length: mx.array
    ) -> mx.array:
        """Keep exactly the path of `tree` that was accepted; returns the new length [B].

        A chain's rows lie in place already. Those of a tree are put in place by the next step's
        write, or by `settle`.
        """
        self.pending = None if tree.is_chain else Pending(path, n_accepted, length)
        return length + 1 + n_accepted

    def text_rows(
        self,
        indices: Sequence[int],
        length: mx.array,
        nodes: int = 0,
        accepted: Acceptance | None = None,
    ) -> TargetRows:
        """What some layers hold of the text, straight behind a call.

        Shapes:
          length: [B] int32, committed before a tree of `nodes` of which `accepted` was kept; of
                  prompts all of it
        """
        plan = self.plan
        extent = plan.extent if isinstance(plan, TreePlan) else plan.start + plan.count
        held = []
        for layer in (self.layers[i] for i in indices):
            assert layer.keys is not None
            assert layer.values is not None
            held.append((layer.keys[:, :, :extent], layer.values[:, :, :extent]))
        return TargetRows(tuple(held), rows_of_text(length, nodes, accepted, extent))

    def settle(self) -> None:
        """Put a pending path in place, so that the rows below the length are all valid."""
        if self.pending is not None:
            for layer in self.layers:
                layer.settle(self.pending)
        self.pending = None
        for layer in self.layers:
            layer.tree_keys = layer.tree_values = None

    def repeated(self, count: int) -> TreeCache:
        """A cache of `count` sequences that all begin like this one's only one."""
        assert self.pending is None, "settle() first"
        copy = TreeCache(len(self.layers))
        for mine, theirs in zip(self.layers, copy.layers, strict=True):
            assert mine.keys is not None
            assert mine.values is not None
            theirs.keys = mx.repeat(mine.keys, count, axis=0)
            theirs.values = mx.repeat(mine.values, count, axis=0)
        return copy

    def snapshot(self) -> Snapshot:
        """What a step that is only built, not submitted, would have changed.

        Drop it before submitting: a buffer with two references is copied whole when written.
        """
        return Snapshot(self.rows, self.pending)

    def restore(self, before: Snapshot) -> None:
        """Forget a step that was built and not submitted."""
        self.rows, self.pending = before.rows, before.pending

    @property
    def buffers(self) -> list[mx.array]:
        """All arrays that hold state, for evaluation."""
        return [a for layer in self.rows for a in layer if a is not None]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.buffers)


def _extent(rows: int) -> int:
    return round_up(rows, max(EXTENT_STEP, (1 << rows.bit_length()) >> 4))


def _gather_index(pending: Pending, n_old: int, n_new: int) -> mx.array:
    """Which row comes where: the accepted path first, the new tree's rows straight behind it.

    With path 0-2, one draft accepted, 3 old and 2 new nodes: [0, 2, 3, 4, ...].
    """
    L = pending.path.shape[1]
    kept = 1 + pending.n_accepted[:, None]
    i = mx.arange(L + n_new)[None, :]
    path = mx.pad(pending.path, [(0, 0), (0, n_new)])
    behind = mx.minimum(n_old + i - kept, n_old + n_new - 1)
    return mx.where(i < kept, path, behind)


def _tree_rows(layer: LayerCache) -> int:
    assert layer.tree_keys is not None
    return layer.tree_keys.shape[2]
