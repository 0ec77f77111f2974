"""One layer's keys and values, with the interface that mlx-lm's attention uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from redrafter_mlx.speculation.constants import iota, is_root
from redrafter_mlx.target_model.masks import windowed


class AttentionCache(Protocol):
    """What an attention layer needs from its cache; see `LayerCache`."""

    @property
    def offset(self) -> int | mx.array: ...

    def make_mask(self, n: int, *, window_size: int | None = None) -> mx.array | str | None: ...

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]: ...


class PromptSpan(NamedTuple):
    """A run of prompt tokens in slots that the host knows; slices and mask as in mlx-lm's KVCache.

    offset:   the first slot, which is its rotary position
    first:    [1] int32, the same on the device
    extent:   number of slots that attention reads: up to the last token
    capacity: slots that the buffers have after the call
    """

    offset: int
    first: mx.array
    extent: int
    capacity: int


class TreePlan(NamedTuple):
    """Which cache slots one tree's keys and values go to, and what its nodes attend to.

    Shapes:
      offset:   [B] for a chain, else [B, N] int32: rotary positions
      mask:     [B, 1, N, extent] bool, [N, extent] if B = 1; True = may attend
      slots:    [B, 1, N, 1] int32, the slot of each node
      moves:    [B, 1, M, 1] int32, the slot of each node of the previous tree; None if the accepted
                ones are already in their slots

    extent: number of slots that attention reads
    capacity: slots that the buffers have after the call
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
        """Return the slot [B, 1, M, 1] of each of the tree's M nodes, after the committed text.

        With path 0-2, one draft accepted, of 4 nodes, after 5 positions: 5, 7, 6, 7. Nodes that
        were not accepted go to the next root's slot, which the root is written to after them.
        """
        depth = iota(self.path.shape[1])[:, None]
        accepted = depth <= self.n_accepted[:, None, None]
        here = (self.path[:, :, None] == iota(nodes)) & accepted  # [B, L, M]
        after = 1 + self.n_accepted[:, None]
        depths = mx.min(mx.where(here, depth, after[:, :, None]), axis=1)
        return (self.length[:, None] + depths)[:, None, :, None]


LayerBuffers = tuple[mx.array | None, mx.array | None, mx.array | None, mx.array | None]
"""The buffers of one layer: keys, values, tree keys, tree values; see LayerCache."""


class LayerCache:
    """One layer's buffers, with the three members that an mlx-lm attention layer uses.

    Shapes:
      keys, values: [B, K, T, head size], slots below the committed length are valid
      tree_keys, tree_values: [B, K, N, head size], the last tree's nodes in tree order; None
                     after a chain, whose nodes are already in their slots

    plan:    of the next call
    offset:  the rotary position(s) of its query rows, an int or an array
    windows: sizes of the sliding windows that the model asked masks for

    All slots after the committed text are finite: a query row gives them weight 0 by its mask, and
    0 times a value that is not finite is NaN.
    """

    def __init__(self) -> None:
        self.plan: PromptSpan | TreePlan | None = None
        self.offset: int | mx.array = 0
        self.windows: frozenset[int] = frozenset()
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.tree_keys: mx.array | None = None
        self.tree_values: mx.array | None = None

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the mask of this call, as mlx-lm's `create_attention_mask` expects it.

        In a sliding window, a query row sees the newest `window_size` positions up to its own. All
        slots are kept, so a prefix of the text is valid for layers with windows too.
        """
        plan = self.plan
        assert plan is not None
        if window_size is not None:
            self.windows |= {window_size}
            if plan.extent <= window_size:
                window_size = None
        if isinstance(plan, TreePlan):
            return plan.mask if window_size is None else windowed(plan.mask, window_size)
        if n == 1 and window_size is None:
            return None
        if return_array or window_size is not None:
            mask: mx.array = create_causal_mask(n, plan.offset, window_size=window_size)
            return mask
        return "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write this call's keys and values [B, K, n, head size]; return all it may attend to."""
        plan, old_keys, old_values = self.plan, self.keys, self.values
        assert plan is not None
        B, K, n, size = keys.shape
        if old_keys is None or old_values is None:
            old_keys = mx.zeros((B, K, plan.capacity, size), keys.dtype)
            old_values = mx.zeros((*values.shape[:2], plan.capacity, values.shape[3]), values.dtype)
        if isinstance(plan, PromptSpan):
            # Not `old_keys[...] = keys`: that would change the array that a snapshot holds.
            self.keys = mx.slice_update(old_keys, keys, plan.first, axes=(2,))
            self.values = mx.slice_update(old_values, values, plan.first, axes=(2,))
            return self.keys[:, :, : plan.extent], self.values[:, :, : plan.extent]
        if plan.moves is not None:
            assert self.tree_keys is not None
            assert self.tree_values is not None
            old_keys = mx.put_along_axis(old_keys, plan.moves, self.tree_keys, axis=2)
            old_values = mx.put_along_axis(old_values, plan.moves, self.tree_values, axis=2)
        if n > 1:
            keys, values = _finite_drafts(keys, values)
        self.tree_keys, self.tree_values = (keys, values) if plan.keep else (None, None)
        # In place, if nothing else refers to the buffer: one kernel, where a slice takes two.
        self.keys = mx.put_along_axis(old_keys, plan.slots, keys, axis=2)
        self.values = mx.put_along_axis(old_values, plan.slots, values, axis=2)
        return self.keys[:, :, : plan.extent], self.values[:, :, : plan.extent]

    def move(self, slots: mx.array) -> None:
        """Write the last tree's nodes to their slots [B, 1, M, 1], and drop them."""
        if self.keys is not None and self.values is not None and self.tree_keys is not None:
            assert self.tree_values is not None
            self.keys = mx.put_along_axis(self.keys, slots, self.tree_keys, axis=2)
            self.values = mx.put_along_axis(self.values, slots, self.tree_values, axis=2)
        self.tree_keys = self.tree_values = None


def _finite_drafts(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Replace what is not finite in a tree's rows [B, K, N, head size] by 0, except in the root's.

    Every node attends to the root, which is committed, so it stays as the model computes it.
    """
    root = is_root(keys.shape[2])[:, None]
    keys = mx.where((keys - keys == 0) | root, keys, 0)  # inf - inf is NaN
    return keys, mx.where((values - values == 0) | root, values, 0)
