"""The keys and values of a layer with a sliding window: those of the window, in a ring of slots."""

from __future__ import annotations

import mlx.core as mx

from redrafter_mlx.speculation.constants import iota
from redrafter_mlx.target_model.cache.layer_cache import LayerCache
from redrafter_mlx.target_model.cache.plans import RING_SLACK, PromptSpan, TreePlan, ring_size


class WindowCache(LayerCache):
    """A layer's cache that keeps its window, and a few slots more for a tree's nodes.

    Position p is in slot p % R. The keys have their rotary positions, so their order in the slots
    does not matter, and a step writes and reads them in place. Before R positions are read, it is
    like a cache that keeps all.

    ring: R, the number of slots
    """

    ring: int

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self.ring = ring_size(window)

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the mask of this call; see `LayerCache`. A tree's is of its window."""
        plan = self.plan
        if not (isinstance(plan, TreePlan) and plan.rings):
            return super().make_mask(n, return_array, window_size)
        mask = plan.of_window(self.window).mask
        return mask[None, None] if return_array and mask.ndim == 2 else mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write this call's keys and values [B, K, n, head size]; return all it may attend to."""
        plan = self.plan
        if not isinstance(plan, PromptSpan):
            return super().update_and_fetch(keys, values)
        if plan.extent <= self.ring:
            self.plan = plan._replace(capacity=min(plan.capacity, self.ring))
            return super().update_and_fetch(keys, values)
        read_keys, new_keys = self._after_prompt(plan, self.keys, keys)
        read_values, new_values = self._after_prompt(plan, self.values, values)
        self.buffers = new_keys, new_values, None, None
        return read_keys, read_values

    def _after_prompt(
        self, plan: PromptSpan, old: mx.array | None, new: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return what a prompt's chunk reads, in the order of positions, and the ring after it."""
        start, end, R = plan.offset, plan.extent, self.ring
        B, K, _, size = new.shape
        if old is None:
            old = mx.zeros((B, K, R, size), new.dtype)
        before = [old[:, :, part] for part in self._parts(plan.first(self.window), start)]
        read = mx.concatenate([*before, new], axis=2) if before else new
        kept, ring = max(start, end - R), old
        at = kept - start
        for part in self._parts(kept, end):
            count = part.stop - part.start
            piece = new[:, :, at : at + count]
            # Not `ring[...] = piece`: that would change the array that a snapshot holds.
            ring = mx.slice_update(ring, piece, mx.array([part.start]), axes=(2,))
            at += count
        return read, ring

    def _parts(self, start: int, end: int) -> list[slice]:
        """Return the runs of slots of the positions from `start` to `end`, at most R, in order."""
        if start == end:
            return []
        first, last = start % self.ring, (end - 1) % self.ring + 1
        if first < last:
            return [slice(first, last)]
        return [slice(first, self.ring), slice(0, last)]

    def positions(self, length: mx.array, extent: int) -> mx.array:
        """Return the position [B, extent] in each slot, -1 if it is not of the window's newest."""
        column = (iota(extent)[None] - length[:, None]) % self.ring
        position = length[:, None] + column - self.ring
        return mx.where((column >= RING_SLACK) & (position >= 0), position, -1)

    def move(self, slots: mx.array) -> None:
        """Write the last tree's nodes to the slots of positions [B, 1, M, 1], and drop them."""
        super().move(slots % self.ring)

    def grow(self, capacity: int) -> None:
        """Grow the buffers to at least so many slots, or to the ring."""
        super().grow(min(capacity, self.ring))

    @property
    def state(self) -> tuple[mx.array, ...]:
        """The keys and values."""
        return tuple(a for a in (self.keys, self.values) if a is not None)

    @state.setter
    def state(self, state: tuple[mx.array, ...]) -> None:
        keys, values = state
        self.buffers = keys, values, None, None

    def _slots(self, slots: int | None) -> int | None:
        """Return how many slots hold the first `slots` positions; None if that may be any."""
        return None if self.capacity == self.ring else slots
