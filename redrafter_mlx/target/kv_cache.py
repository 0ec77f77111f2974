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

from redrafter_mlx.speculation.tree import TokenTree
from redrafter_mlx.target.cache_slots import round_up
from redrafter_mlx.target.layer_cache import (
    LayerCache,
    LayerRows,
    NextCall,
    Pending,
    PromptSpan,
    TreePlan,
)
from redrafter_mlx.target.masks import attention_mask, chain_mask

CAPACITY_STEP = 256
"""Buffers grow by this many rows, so that growing copies rarely."""

EXTENT_STEP = 32
"""Attention reads the buffers up to the length's bound, rounded up to this many rows or, in long
texts, to an eighth more: each extent is a trace of its own."""


@dataclass(frozen=True)
class Snapshot:
    """The cache's references at one moment."""

    rows: Sequence[LayerRows]
    pending: Pending | None


class TreeCache:
    """The cache of one sequence batch, over all layers of a target."""

    def __init__(self, n_layers: int) -> None:
        self._call = NextCall(PromptSpan(0, 0, 0))
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
        self.plan = PromptSpan(start, count, round_up(start + count, CAPACITY_STEP))

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

    def plan_level(self, mask: mx.array, depth: int, length: mx.array, bound: int) -> None:
        """The next call appends W nodes of one depth to a tree of M - W nodes after the text.

        Shapes:
          mask:   [B, W, M] bool, True = may attend; the new nodes come last
          length: [B] int32, committed, at most `bound`; a node of depth 0 stands there
        """
        _, W, M = mask.shape
        extent = _extent(bound + M)
        attended = attention_mask(mask, length, extent)
        self.plan = TreePlan(
            mx.broadcast_to(length[:, None] + depth, (mask.shape[0], W)),
            attended[0, 0] if attended.shape[0] == 1 else attended,
            length + (M - W),
            None,
            extent,
            round_up(extent, CAPACITY_STEP),
            keep=False,
        )

    def plan_forks(self, places: mx.array, ahead: int, length: int) -> None:
        """The next call appends one token to each of N forks of a text of `length` rows.

        A fork goes on from its place [N] int32 in the text and has `ahead` tokens already; it sees
        the text in front of that place and itself. Their tokens lie behind the text, one of each
        fork after the other.

        With places 1 and 3 in a text of 4, ahead 1:

            text      fork rows
            1 0 0 0   1 0 1 0
            1 1 1 0   0 1 0 1
        """
        assert self.pending is None, "settle() first"
        N = places.shape[0]
        extent = length + (ahead + 1) * N
        column = mx.arange(extent)[None]
        own = (column - length) % N == mx.arange(N)[:, None]
        mask = mx.where(column < length, column < places[:, None], own)
        self.plan = TreePlan(
            (places + ahead)[None], mask, mx.array([length + ahead * N]), None, extent,
            round_up(extent, CAPACITY_STEP), keep=False,
        )  # fmt: skip

    def commit(
        self, tree: TokenTree, path: mx.array, n_accepted: mx.array, length: mx.array
    ) -> mx.array:
        """Keep exactly the path of `tree` that was accepted; returns the new length [B].

        A chain's rows lie in place already. Those of a tree are put in place by the next step's
        write, or by `settle`.
        """
        self.pending = None if tree.is_chain else Pending(path, n_accepted, length)
        return length + 1 + n_accepted

    def settle(self) -> None:
        """Put a pending path in place, so that the rows below the length are all valid."""
        if self.pending is not None:
            for layer in self.layers:
                layer.settle(self.pending)
        self.pending = None
        for layer in self.layers:
            layer.tree_keys = layer.tree_values = None

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
