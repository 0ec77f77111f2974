"""One layer's keys and values, with the interface that mlx-lm's attention uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from redrafter_mlx.speculation.constants import iota, is_root
from redrafter_mlx.target_model.cache_slots import with_capacity, write_slots
from redrafter_mlx.target_model.masks import windowed


class AttentionCache(Protocol):
    """What an attention layer needs from its cache; see `LayerCache`."""

    @property
    def offset(self) -> int | mx.array: ...

    def make_mask(self, n: int, *, window_size: int | None = None) -> mx.array | str | None: ...

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]: ...


@dataclass(frozen=True)
class PromptSpan:
    """A run of prompt tokens in slots that the host knows; slices and mask as in mlx-lm's KVCache.

    capacity: slots that the buffers have after the call
    """

    start: int
    count: int
    capacity: int


@dataclass(frozen=True)
class TreePlan:
    """Which cache slots one tree's keys and values go to, and what its nodes attend to.

    Shapes:
      offset:   [B] for a chain, else [B, N] int32: rotary positions
      mask:     [B, 1, N, extent] bool, [N, extent] if B = 1; True = may attend
      slots:    [B, N] int32, the slot of each node
      moves:    [B, M] int32, the slot of each node of the previous tree; None if the accepted ones
                are already in their slots

    keep: whether the next step may have to move this tree's path to its slots
    """

    offset: mx.array
    mask: mx.array
    slots: mx.array
    moves: mx.array | None
    extent: int
    capacity: int
    keep: bool


@dataclass(frozen=True)
class Pending:
    """An accepted path whose keys and values are still in tree order.

    Shapes:
      path:       [B, L] int32 nodes, root first
      n_accepted: [B] int32, drafts accepted (the root not counted)
      length:     [B] int32, committed length before the path
    """

    path: mx.array
    n_accepted: mx.array
    length: mx.array

    def moves(self, nodes: int) -> mx.array:
        """Return the slot [B, M] of each of the tree's M nodes, after the committed text.

        With path 0-2, one draft accepted, of 4 nodes, after 5 positions: [5, 7, 6, 7]. Nodes that
        were not accepted go to the next root's slot, which the root is written to after them.
        """
        depth = iota(self.path.shape[1])[:, None]
        accepted = depth <= self.n_accepted[:, None, None]
        here = (self.path[:, :, None] == iota(nodes)) & accepted  # [B, L, M]
        after = 1 + self.n_accepted[:, None]
        depths = mx.min(mx.where(here, depth, after[:, :, None]), axis=1)
        return self.length[:, None] + depths


LayerBuffers = tuple[mx.array | None, mx.array | None, mx.array | None, mx.array | None]
"""The buffers of one layer: keys, values, tree keys, tree values; see LayerCache."""


@dataclass
class NextCall:
    """The plan of the next call, shared by all layers. (If layers referred to their cache instead,
    only the garbage collector would free it, some time later.)

    windows: sizes of sliding windows that the model asked masks for
    """

    plan: PromptSpan | TreePlan
    windows: set[int] = field(default_factory=set)


class LayerCache:
    """One layer's buffers, with the three members that an mlx-lm attention layer uses.

    Shapes:
      keys, values: [B, K, T, head size], slots below the committed length are valid
      tree_keys, tree_values: [B, K, N, head size], the last tree's nodes in tree order; None
                     after a chain, whose nodes are already in their slots

    All slots after the committed text are finite: a query row gives them weight 0 by its mask, and
    0 times a value that is not finite is NaN.
    """

    def __init__(self, call: NextCall) -> None:
        self._call = call
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.tree_keys: mx.array | None = None
        self.tree_values: mx.array | None = None

    @property
    def offset(self) -> int | mx.array:
        """The rotary position(s) of this call's query rows."""
        plan = self._call.plan
        return plan.start if isinstance(plan, PromptSpan) else plan.offset

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the mask of this call, as mlx-lm's `create_attention_mask` expects it.

        In a sliding window, a query row sees the newest `window_size` positions up to its own. All
        slots are kept, so a prefix of the text is valid for layers with windows too.
        """
        plan = self._call.plan
        end = plan.extent if isinstance(plan, TreePlan) else plan.start + n
        if window_size is not None:
            self._call.windows.add(window_size)
            if end <= window_size:
                window_size = None
        if isinstance(plan, TreePlan):
            return plan.mask if window_size is None else windowed(plan.mask, window_size)
        if n == 1 and window_size is None:
            return None
        if return_array or window_size is not None:
            mask: mx.array = create_causal_mask(n, plan.start, window_size=window_size)
            return mask
        return "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write this call's keys and values [B, K, n, head size]; return all it may attend to."""
        plan = self._call.plan
        if isinstance(plan, PromptSpan):
            return self._append(plan, keys, values)
        self.keys = with_capacity(self.keys, keys, plan.capacity)
        self.values = with_capacity(self.values, values, plan.capacity)
        if plan.moves is not None:
            self._move(plan.moves)
        if keys.shape[2] > 1:
            keys, values = finite_drafts(keys), finite_drafts(values)
        self.tree_keys, self.tree_values = (keys, values) if plan.keep else (None, None)
        self.keys = write_slots(self.keys, keys, plan.slots)
        self.values = write_slots(self.values, values, plan.slots)
        return self.keys[:, :, : plan.extent], self.values[:, :, : plan.extent]

    def grow(self, capacity: int) -> None:
        """Grow the buffers to at least `capacity` slots, if there are any."""
        if self.keys is not None and self.values is not None:
            self.keys = with_capacity(self.keys, self.keys, capacity)
            self.values = with_capacity(self.values, self.values, capacity)

    def flush(self, pending: Pending) -> None:
        """Move the pending path to its slots."""
        if self.tree_keys is not None:
            self._move(pending.moves(self.tree_keys.shape[2]))
        self.tree_keys = self.tree_values = None

    def _move(self, slots: mx.array) -> None:
        """Write the last tree's nodes to their slots [B, M]."""
        assert self.keys is not None
        assert self.values is not None
        assert self.tree_keys is not None
        assert self.tree_values is not None
        self.keys = write_slots(self.keys, self.tree_keys, slots)
        self.values = write_slots(self.values, self.tree_values, slots)

    def _append(
        self, plan: PromptSpan, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        end = plan.start + plan.count
        self.keys = with_capacity(self.keys, keys, plan.capacity)
        self.values = with_capacity(self.values, values, plan.capacity)
        at = mx.array([plan.start])
        # Not `self.keys[...] = keys`: that would change the array that a snapshot holds.
        self.keys = mx.slice_update(self.keys, keys, at, axes=(2,))
        self.values = mx.slice_update(self.values, values, at, axes=(2,))
        return self.keys[:, :, :end], self.values[:, :, :end]


def finite_drafts(rows: mx.array) -> mx.array:
    """Replace what is not finite in a tree's rows [B, K, N, head size] by 0, except in the root's.

    Every node attends to the root, which is committed, so it stays as the model computes it.
    """
    kept = (rows - rows == 0) | is_root(rows.shape[2])[:, None]  # inf - inf is NaN
    return mx.where(kept, rows, 0)
