"""One layer's keys and values, with the interface that mlx-lm's attention uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from redrafter_mlx.speculation.constants import iota, is_root
from redrafter_mlx.target_model.cache.plans import LayerPlan, PromptSpan, TreePlan
from redrafter_mlx.target_model.cache.slots import concatenate_padded, grown, windowed


class AttentionCache(Protocol):
    """What an attention layer needs from its cache; see `LayerCache`."""

    @property
    def offset(self) -> int | mx.array: ...

    def make_mask(self, n: int, *, window_size: int | None = None) -> mx.array | str | None: ...

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]: ...


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
    buffers: keys, values, tree_keys, tree_values; the first half are in slots, the others in tree
             order, and a subclass may hold more arrays in each half
    n_arrays: number of arrays in each half
    offset:  the rotary position(s) of its query rows, an int or an array
    window:  size of the sliding window; None if the layer attends to all positions, or if its
             masks alone say to which
    windows: sizes of the sliding windows that the model asked masks for
    ring:    number of slots that it keeps at most; None if it keeps all positions

    All slots after the committed text are finite: a query row gives them weight 0 by its mask, and
    0 times a value that is not finite is NaN.
    """

    ring: int | None = None
    n_arrays = 2

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.plan: LayerPlan | None = None
        self.offset: int | mx.array = 0
        self.windows: frozenset[int] = frozenset()
        self.buffers: LayerBuffers = (None,) * (2 * self.n_arrays)

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
            ours = plan.whole.mask
            ours = ours if window_size is None else windowed(ours, window_size)
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
        window = self.window
        here = plan if isinstance(plan, PromptSpan) or window is None else plan.of_window(window)
        here = here.whole if isinstance(here, TreePlan) else here
        if old_keys is None or old_values is None:
            old_keys, old_values = self._blank(here.capacity, keys, values)
        if isinstance(here, PromptSpan):
            # Not `old_keys[...] = keys`: that would change the array that a snapshot holds.
            all_keys = mx.slice_update(old_keys, keys, here.at, axes=(2,))
            all_values = mx.slice_update(old_values, values, here.at, axes=(2,))
            self.buffers = all_keys, all_values, tree_keys, tree_values
            read = slice(0 if window is None else here.first(window), here.extent)
            return all_keys[:, :, read], all_values[:, :, read]
        assert isinstance(plan, TreePlan)
        if here.moves is not None:
            assert tree_keys is not None
            assert tree_values is not None
            old_keys = mx.put_along_axis(old_keys, here.moves, tree_keys, axis=2)
            old_values = mx.put_along_axis(old_values, here.moves, tree_values, axis=2)
        if keys.shape[2] > 1:
            keys, values = finite_drafts(keys, values)
        kept = (keys, values) if plan.keep else (None, None)
        if here.apart:
            self.buffers = old_keys, old_values, *kept
            pairs = ((old_keys, keys), (old_values, values))
            both = [mx.concatenate([old[:, :, : here.extent], a], axis=2) for old, a in pairs]
            return both[0], both[1]
        # In place, if nothing else refers to the buffer: one kernel, where a slice takes two.
        all_keys = mx.put_along_axis(old_keys, here.slots, keys, axis=2)
        all_values = mx.put_along_axis(old_values, here.slots, values, axis=2)
        self.buffers = all_keys, all_values, *kept
        return all_keys[:, :, : here.extent], all_values[:, :, : here.extent]

    def _blank(self, capacity: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return empty buffers for rows like these [B, K, n, head size]."""
        B, K = keys.shape[:2]
        return (
            mx.zeros((B, K, capacity, keys.shape[3]), keys.dtype),
            mx.zeros((B, values.shape[1], capacity, values.shape[3]), values.dtype),
        )

    def grow(self, capacity: int) -> None:
        """Grow the buffers to at least so many slots."""
        if self.used and self.capacity < capacity:
            larger = [grown(a, capacity) for a in self.slots]
            self.buffers = *larger, *self.buffers[self.n_arrays :]

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
        self.buffers = self.keys, values, *self.buffers[2:]

    @property
    def slots(self) -> list[mx.array]:
        """The arrays [B, K, T, size] of all slots; empty before the first call."""
        return [a for a in self.buffers[: self.n_arrays] if isinstance(a, mx.array)]

    @property
    def tree_nodes(self) -> list[mx.array]:
        """The same of the last tree's nodes, in tree order; empty if these are in their slots."""
        return [a for a in self.buffers[self.n_arrays :] if isinstance(a, mx.array)]

    @property
    def capacity(self) -> int:
        """T, the number of slots of each sequence."""
        first = self.buffers[0]
        return first.shape[2] if isinstance(first, mx.array) else 0

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that it holds."""
        return [*self.slots, *self.tree_nodes]

    @property
    def used(self) -> bool:
        """Whether calls have used it."""
        return self.buffers[0] is not None

    def committed(self, slots: int, nodes: bool) -> tuple[mx.array, mx.array]:
        """Return keys and values of the first slots, and after them of the last tree's `nodes`."""
        held = [a[:, :, :slots] for a in self.slots]
        if nodes:
            both = zip(held, self.tree_nodes, strict=True)
            held = [mx.concatenate([*each], axis=2) for each in both]
        keys, values = held
        return keys, values

    def positions(self, length: mx.array, extent: int) -> mx.array:
        """Return the position [B, extent] in each slot, -1 if it is not of the first `length`."""
        slots = iota(extent)[None]
        return mx.where(slots < length[:, None], slots, -1)

    def after(self, array: mx.array) -> None:
        """Make the buffers depend on the array."""
        first, *others = self.buffers
        if isinstance(first, mx.array):
            self.buffers = mx.depends(first, array), *others

    def take(self, index: mx.array, slots: int | None) -> LayerBuffers:
        """Return the buffers of some batch rows of a flushed cache, their first slots or all."""
        return self._mapped(lambda buffer: buffer[:, :, : self._slots(slots)][index])

    def shared(self, slots: int) -> LayerBuffers:
        """Return the first slots of a flushed cache's buffers."""
        return self._mapped(lambda buffer: buffer[:, :, : self._slots(slots)])

    def joined(self, others: Sequence[LayerCache]) -> LayerBuffers:
        """Return the buffers of several flushed caches' batch rows."""
        parts = zip(*(layer.slots for layer in (self, *others) if layer.used), strict=True)
        return *map(concatenate_padded, parts), *(None,) * self.n_arrays

    def trim(self, slots: int) -> None:
        """Keep only the first slots, computed; buffers of the right size are not copied."""
        self.buffers = self._mapped(
            lambda buffer: mx.contiguous(buffer[:, :, : self._slots(slots)])
        )

    def trimmed_bytes(self, slots: int) -> int:
        """Return the bytes that `trim` leaves."""
        kept = self._slots(slots)
        return self.slot_bytes * (self.capacity if kept is None else min(self.capacity, kept))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of all rows."""
        return sum(a.nbytes // a.shape[2] for a in self.slots)

    def _slots(self, slots: int | None) -> int | None:
        """Return how many slots hold the first `slots` positions; None if that may be any."""
        return slots

    def _mapped(self, function: Callable[[mx.array], mx.array]) -> LayerBuffers:
        nothing = (None,) * self.n_arrays
        return (*map(function, self.slots), *nothing) if self.used else (*nothing, *nothing)

    def move(self, slots: mx.array) -> None:
        """Write the last tree's nodes to their slots [B, 1, M, 1], and drop them."""
        if nodes := self.tree_nodes:
            each = zip(self.slots, nodes, strict=True)
            moved = [mx.put_along_axis(held, slots, tree, axis=2) for held, tree in each]
            self.buffers = *moved, *(None,) * self.n_arrays


def finite_drafts(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Replace what is not finite in a tree's rows [B, K, N, head size] by 0, except in the root's.

    Every node attends to the root, which is committed, so it stays as the model computes it.
    """
    root = is_root(keys.shape[2])[:, None]
    keys = mx.where((keys - keys == 0) | root, keys, 0)  # inf - inf is NaN
    return keys, mx.where((values - values == 0) | root, values, 0)
