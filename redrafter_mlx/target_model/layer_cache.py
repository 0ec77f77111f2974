"""One layer's keys and values, with the interface that mlx-lm's attention uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, cast

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from redrafter_mlx.speculation.constants import iota, is_root
from redrafter_mlx.target_model.cache_slots import concatenate_padded, grown
from redrafter_mlx.target_model.masks import windowed
from redrafter_mlx.target_model.recurrent.interface import AcceptedPath, TreeNodes


class AttentionCache(Protocol):
    """What an attention layer needs from its cache; see `LayerCache`."""

    @property
    def offset(self) -> int | mx.array: ...

    def make_mask(self, n: int, *, window_size: int | None = None) -> mx.array | str | None: ...

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]: ...


class PromptSpan(NamedTuple):
    """A run of prompt tokens in slots that the host knows; slices and mask as in mlx-lm's KVCache.

    offset:   the first slot, which is its rotary position
    at:       [1] int32, the same on the device
    extent:   number of slots up to the last token
    capacity: slots that the buffers have after the call
    """

    offset: int
    at: mx.array
    extent: int
    capacity: int

    def first(self, window: int | None) -> int:
        """Return the first slot that attention reads."""
        return 0 if window is None else max(0, self.offset - window + 1)


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
    nodes: the same trees for recurrences; None for single tokens
    accepted: the path of the previous tree that recurrent states are committed to; None if they are
    """

    offset: mx.array
    mask: mx.array
    slots: mx.array
    moves: mx.array | None
    extent: int
    capacity: int
    keep: bool
    nodes: TreeNodes | None = None
    accepted: AcceptedPath | None = None

    def split(self) -> tuple[PlanArrays, PlanSizes]:
        """Return the arrays, and what is fixed in a compiled call; see `of`."""
        nodes, accepted = self.nodes, self.accepted
        of_nodes = None if nodes is None else nodes.arrays
        of_path = None if accepted is None else accepted.arrays
        arrays = (self.offset, self.mask, self.slots, self.moves, of_nodes, of_path)
        form = (0, False) if nodes is None else (nodes.max_depth, nodes.is_chain)
        return arrays, (self.extent, self.capacity, self.keep, *form)

    @classmethod
    def of(cls, arrays: PlanArrays, sizes: PlanSizes) -> TreePlan:
        """Return the plan that was split."""
        offset, mask, slots, moves, of_nodes, of_path = arrays
        extent, capacity, keep, max_depth, is_chain = sizes
        nodes = None if of_nodes is None else TreeNodes(*of_nodes, max_depth, is_chain)
        accepted = None if of_path is None else AcceptedPath(*of_path)
        return cls(offset, mask, slots, moves, extent, capacity, keep, nodes, accepted)


Arrays = tuple[mx.array, mx.array]
PlanArrays = tuple[mx.array, mx.array, mx.array, mx.array | None, Arrays | None, Arrays | None]
PlanSizes = tuple[int, int, bool, int, bool]
LayerPlan: TypeAlias = "PromptSpan | TreePlan"


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
        return self._positions(nodes)[0][:, None, :, None]

    def positions(self, nodes: int) -> mx.array:
        """Return the position [B, M] of each of the tree's M nodes, -1 if it was not accepted.

        Those of the example above: 5, -1, 6, -1.
        """
        positions, end = self._positions(nodes)
        return mx.where(positions < end, positions, -1)

    def _positions(self, nodes: int) -> tuple[mx.array, mx.array]:
        """Return the position of each node [B, M], the text's end if not accepted; the end."""
        depth = iota(self.path.shape[1])[:, None]
        accepted = depth <= self.n_accepted[:, None, None]
        here = (self.path[:, :, None] == iota(nodes)) & accepted  # [B, L, M]
        after = 1 + self.n_accepted[:, None]
        depths = mx.min(mx.where(here, depth, after[:, :, None]), axis=1)
        return self.length[:, None] + depths, self.length[:, None] + after


class Committed(NamedTuple):
    """Keys and values of committed positions, in slots of which some hold none.

    Shapes:
      keys, values: [B, K, S, head size] of each layer
      positions:    [B, S] int32 of the slots in the text, -1 where nothing is committed
    """

    keys: tuple[mx.array, ...]
    values: tuple[mx.array, ...]
    positions: mx.array

    def of(self, layers: Sequence[int]) -> Committed:
        """Return those of some of the layers."""
        keys, values = (tuple(each[i] for i in layers) for each in self[:2])
        return Committed(keys, values, self.positions)


Buffers = tuple[mx.array | None, mx.array | None, mx.array | None, mx.array | None]
LayerBuffers = tuple[object, ...]
"""The buffers of one layer: its arrays, None where it has none, or tuples of them."""


class LayerCache:
    """One layer's buffers, with the three members that an mlx-lm attention layer uses.

    Shapes:
      keys, values: [B, K, T, head size], slots below the committed length are valid
      tree_keys, tree_values: [B, K, N, head size], the last tree's nodes in tree order; None
                     after a chain, whose nodes are already in their slots

    plan:    of the next call
    buffers: keys, values, tree_keys, tree_values
    offset:  the rotary position(s) of its query rows, an int or an array
    window:  size of the sliding window; None if the layer attends to all positions, or if its
             masks alone say to which
    windows: sizes of the sliding windows that the model asked masks for

    All slots after the committed text are finite: a query row gives them weight 0 by its mask, and
    0 times a value that is not finite is NaN.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.plan: LayerPlan | None = None
        self.offset: int | mx.array = 0
        self.windows: frozenset[int] = frozenset()
        self.buffers: LayerBuffers = (None,) * 4

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the mask of this call, as mlx-lm's `create_attention_mask` expects it.

        In a sliding window, a query row sees the newest `window_size` positions up to its own. All
        slots are kept, so a prefix of the text is valid for layers with windows too. A prompt's
        mask has the slots that the layer reads.
        """
        plan = self.plan
        assert plan is not None
        first = plan.first(self.window) if isinstance(plan, PromptSpan) else 0
        if window_size is not None:
            self.windows |= {window_size}
            if plan.extent - first <= window_size:
                window_size = None
        if isinstance(plan, TreePlan):
            ours = plan.mask if window_size is None else windowed(plan.mask, window_size)
            return ours[None, None] if return_array and ours.ndim == 2 else ours  # as scores have
        if n == 1 and window_size is None:
            return None
        if return_array or window_size is not None:
            mask: mx.array = create_causal_mask(n, plan.offset - first, window_size=window_size)
            return mask
        return "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write this call's keys and values [B, K, n, head size]; return all it may attend to."""
        plan = self.plan
        assert plan is not None
        old_keys, old_values, tree_keys, tree_values = cast("Buffers", self.buffers)
        B, K, n, size = keys.shape
        if old_keys is None or old_values is None:
            old_keys = mx.zeros((B, K, plan.capacity, size), keys.dtype)
            old_values = mx.zeros((*values.shape[:2], plan.capacity, values.shape[3]), values.dtype)
        if isinstance(plan, PromptSpan):
            # Not `old_keys[...] = keys`: that would change the array that a snapshot holds.
            all_keys = mx.slice_update(old_keys, keys, plan.at, axes=(2,))
            all_values = mx.slice_update(old_values, values, plan.at, axes=(2,))
            self.buffers = all_keys, all_values, tree_keys, tree_values
            read = slice(plan.first(self.window), plan.extent)
            return all_keys[:, :, read], all_values[:, :, read]
        if plan.moves is not None:
            assert tree_keys is not None
            assert tree_values is not None
            old_keys = mx.put_along_axis(old_keys, plan.moves, tree_keys, axis=2)
            old_values = mx.put_along_axis(old_values, plan.moves, tree_values, axis=2)
        if n > 1:
            keys, values = _finite_drafts(keys, values)
        # In place, if nothing else refers to the buffer: one kernel, where a slice takes two.
        all_keys = mx.put_along_axis(old_keys, plan.slots, keys, axis=2)
        all_values = mx.put_along_axis(old_values, plan.slots, values, axis=2)
        kept = (keys, values) if plan.keep else (None, None)
        self.buffers = all_keys, all_values, *kept
        return all_keys[:, :, : plan.extent], all_values[:, :, : plan.extent]

    def grow(self, capacity: int) -> None:
        """Grow the buffers to at least so many slots."""
        if self.keys is not None and self.values is not None and self.capacity < capacity:
            self.buffers = grown(self.keys, capacity), grown(self.values, capacity), *self._tree

    @property
    def keys(self) -> mx.array | None:
        return cast("Buffers", self.buffers)[0]

    @keys.setter
    def keys(self, keys: mx.array | None) -> None:
        self.buffers = keys, *self.buffers[1:]

    @property
    def values(self) -> mx.array | None:
        return cast("Buffers", self.buffers)[1]

    @values.setter
    def values(self, values: mx.array | None) -> None:
        self.buffers = self.keys, values, *self._tree

    @property
    def tree_keys(self) -> mx.array | None:
        return self._tree[0]

    @property
    def _tree(self) -> tuple[mx.array | None, mx.array | None]:
        return cast("Buffers", self.buffers)[2:]

    @property
    def capacity(self) -> int:
        """T, the number of slots of each sequence."""
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that it holds."""
        return [a for a in cast("Buffers", self.buffers) if a is not None]

    @property
    def used(self) -> bool:
        """Whether calls have used it."""
        return self.keys is not None

    def committed(self, slots: int, nodes: bool) -> tuple[mx.array, mx.array]:
        """Return keys and values of the first slots, and after them of the last tree's `nodes`."""
        keys, values, tree_keys, tree_values = cast("Buffers", self.buffers)
        assert keys is not None
        assert values is not None
        keys, values = keys[:, :, :slots], values[:, :, :slots]
        if not nodes:
            return keys, values
        assert tree_keys is not None
        assert tree_values is not None
        return (
            mx.concatenate([keys, tree_keys], axis=2),
            mx.concatenate([values, tree_values], axis=2),
        )

    def after(self, array: mx.array) -> None:
        """Make the buffers depend on the array."""
        if self.keys is not None:
            self.keys = mx.depends(self.keys, array)

    def take(self, index: mx.array, slots: int | None) -> LayerBuffers:
        """Return the buffers of some batch rows of a flushed cache, their first slots or all."""
        return self._mapped(lambda buffer: buffer[:, :, :slots][index])

    def shared(self, slots: int) -> LayerBuffers:
        """Return the first slots of a flushed cache's buffers."""
        return self._mapped(lambda buffer: buffer[:, :, :slots])

    def joined(self, others: Sequence[LayerCache]) -> LayerBuffers:
        """Return the buffers of several flushed caches' batch rows."""
        parts = [layer for layer in (self, *others) if layer.keys is not None]
        keys = concatenate_padded([part.keys for part in parts if part.keys is not None])
        values = concatenate_padded([part.values for part in parts if part.values is not None])
        return keys, values, None, None

    def trim(self, slots: int) -> None:
        """Keep only the first slots, computed; buffers of the right size are not copied."""
        self.buffers = self._mapped(lambda buffer: mx.contiguous(buffer[:, :, :slots]))

    def trimmed_bytes(self, slots: int) -> int:
        """Return the bytes that `trim` leaves."""
        held = [a for a in (self.keys, self.values) if a is not None]
        return sum(a.nbytes // a.shape[2] * min(a.shape[2], slots) for a in held)

    def _mapped(self, function: Callable[[mx.array], mx.array]) -> LayerBuffers:
        if self.keys is None or self.values is None:
            return (None, None, None, None)
        return function(self.keys), function(self.values), None, None

    def move(self, slots: mx.array) -> None:
        """Write the last tree's nodes to their slots [B, 1, M, 1], and drop them."""
        keys, values, tree_keys, tree_values = cast("Buffers", self.buffers)
        if keys is not None and values is not None and tree_keys is not None:
            assert tree_values is not None
            keys = mx.put_along_axis(keys, slots, tree_keys, axis=2)
            values = mx.put_along_axis(values, slots, tree_values, axis=2)
        self.buffers = keys, values, None, None


def _finite_drafts(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Replace what is not finite in a tree's rows [B, K, N, head size] by 0, except in the root's.

    Every node attends to the root, which is committed, so it stays as the model computes it.
    """
    root = is_root(keys.shape[2])[:, None]
    keys = mx.where((keys - keys == 0) | root, keys, 0)  # inf - inf is NaN
    return keys, mx.where((values - values == 0) | root, values, 0)
