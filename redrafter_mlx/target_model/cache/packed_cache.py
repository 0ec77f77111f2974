"""One layer's keys and values in 8 or 4 bits, in the layout of mlx-lm's `QuantizedKVCache`.

The numbers of one position are quantised alone, when they are written, so they are the same
whichever call wrote them: a prompt's chunk, a plain step, or a tree of which the position was a
node. Every query row reads quantised keys and values, its own position's too. The first positions
may be read as they are, always the same ones. So a text does not depend on the chunks in which its
prompt was read, nor on what was kept of earlier ones. (mlx-lm's loop reads a prompt's first chunk
before it quantises it, and what lies before its `quantized_kv_start` once a text reaches that.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from redrafter_mlx.runtime.words import count
from redrafter_mlx.target_model.cache.layer_cache import LayerCache, finite_drafts
from redrafter_mlx.target_model.cache.plans import PromptSpan, TreePlan
from redrafter_mlx.target_model.cache.slots import grown

IN_ATTENTION = {"cpu": False, "apple": True, "cuda": False}
"""Whether attention of trees multiplies by quantised keys and values, as mlx-lm's does. They are
dequantised for a call otherwise, one layer after the other, and for prompts always: MLX's products
with quantised matrices take a CPU up to four times as long, and their attention holds the scores of
all rows at once."""

_PACKED = 6
"""Number of quantised arrays of a layer: words, scales and biases of keys and of values."""

_GROUPS = (64, 32)
"""Numbers that share a scale and a bias: mlx-lm's default, or what divides heads of 96."""


class Packing(NamedTuple):
    """How the keys and values of layers that keep all positions are quantised.

    bits:  of a number, 8 or 4
    group: number of numbers of a head that share a scale and a bias
    taken: whether the model's attention takes them quantised, as mlx-lm's function does
    in_attention: whether that of trees is given them so
    start: number of a text's first positions that are read as they are
    """

    bits: int
    group: int
    taken: bool = False
    in_attention: bool = False
    start: int = 0

    @property
    def label(self) -> str:
        """What it does to keys and values, for people."""
        after = f" after {count(self.start, 'token')}" if self.start else ""
        return f"{self.bits}-bit keys and values{after}"

    def pack(self, numbers: mx.array) -> Packed:
        """Quantise numbers [B, K, n, size], each position's alone."""
        words, scales, biases = mx.quantize(numbers, self.group, self.bits)
        return words, scales, biases

    def unpack(self, packed: Sequence[mx.array]) -> mx.array:
        """Return the numbers [B, K, n, size] that were packed, rounded."""
        words, scales, biases = packed
        return mx.dequantize(words, scales, biases, self.group, self.bits)


Packed = tuple[mx.array, mx.array, mx.array]
"""Numbers [B, K, n, size]: words [B, K, n, size * bits / 32] uint32, and scales and biases
[B, K, n, size / group]."""


def group_of(sizes: Iterable[int]) -> int | None:
    """Return the size of the groups into which heads of all these sizes are divided; or None."""
    given = [*sizes]
    return next((g for g in _GROUPS if all(size % g == 0 for size in given)), None)


class PackedCache(LayerCache):
    """A layer's cache that quantises its keys and values.

    Shapes:
      buffers: words, scales and biases of the keys and of the values, [B, K, T, ...]; where the
               first positions are read as they are, keys and values [B, K, start + 1, head size],
               of which the last slot takes what later positions write; and the same of the last
               tree's nodes

    group_size: of the packing; mlx-lm's attention reads it
    """

    def __init__(self, packing: Packing, window: int | None = None) -> None:
        self.n_arrays = _PACKED + (2 if packing.start else 0)
        super().__init__(window)
        self.packing = packing
        self.group_size = packing.group

    @property
    def bits(self) -> int:
        """Bits of a number: mlx-lm's attention takes packed keys from a cache that has this.

        Raises AttributeError if this call's keys are not packed.
        """
        if self.packing.in_attention and isinstance(self.plan, TreePlan):
            return self.packing.bits
        raise AttributeError("this call's keys and values are dequantised")

    @property
    def values(self) -> mx.array | None:
        """The values' words; read-only, as a model that sets its cache's values sets no words."""
        return self.slots[3] if self.used else None

    @values.setter
    def values(self, values: mx.array | None) -> None:
        raise NotImplementedError("it sets the values in its cache")

    @property
    def unpacked_slot_bytes(self) -> int:
        """Bytes of one dequantised slot of all rows; 0 before the first call."""
        scales = [a for a in self.slots[:_PACKED] if a.dtype != mx.uint32][::2]
        return sum(a.nbytes // a.shape[2] * self.packing.group for a in scales)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write this call's keys and values [B, K, n, head size]; return all it may attend to.

        Those are `Packed`, if this call's attention takes them.
        """
        plan = self.plan
        assert plan is not None
        if isinstance(plan, TreePlan) and keys.shape[2] > 1:
            keys, values = finite_drafts(keys, values)
        whole = (keys, values)[: self.n_arrays - _PACKED]
        rows = (*self.packing.pack(keys), *self.packing.pack(values), *whole)
        if isinstance(plan, PromptSpan):
            self._append(plan, rows)
            return self._read(plan.first(self.window), plan.extent)
        self._write(plan, rows)
        if self.packing.in_attention:
            read = [a[:, :, : plan.extent] for a in self.slots]
            return cast("tuple[mx.array, mx.array]", (tuple(read[:3]), tuple(read[3:])))
        found = self._read(0, plan.extent)
        if whole and plan.offset.ndim == 2 and plan.extent > self.packing.start:
            return self._with_early_nodes(plan, rows, found)
        return found

    def _append(self, plan: PromptSpan, rows: Sequence[mx.array]) -> None:
        """Write a prompt's rows."""
        written = self._blanks(plan.capacity, rows)
        for i, new in enumerate(rows):
            kept = new if i < _PACKED else new[:, :, : max(self.packing.start - plan.offset, 0)]
            if kept.shape[2]:  # not in place: that would change the array that a snapshot holds
                written[i] = mx.slice_update(written[i], kept, plan.at, axes=(2,))
        self.buffers = *written, *self.buffers[self.n_arrays :]

    def _write(self, plan: TreePlan, rows: Sequence[mx.array]) -> None:
        """Write a tree's rows, and before them the last tree's."""
        here, nodes = plan.whole, self.tree_nodes
        written = self._blanks(here.capacity, rows)
        if here.moves is not None:
            written = _put(written, here.moves, nodes)
        kept = rows if plan.keep else (None,) * self.n_arrays
        self.buffers = *_put(written, here.slots, rows), *kept

    def _blanks(self, capacity: int, rows: Sequence[mx.array]) -> list[mx.array]:
        """Return the slots; empty ones for rows like these, if there are none."""
        if self.used:
            return self.slots
        each = zip(rows, self._sizes(capacity), strict=True)
        return [mx.zeros((*a.shape[:2], size, a.shape[3]), a.dtype) for a, size in each]

    def _sizes(self, capacity: int) -> list[int]:
        """Return the number of slots in each array, of so many in all."""
        first = min(capacity, self.packing.start + 1)
        return [capacity if i < _PACKED else first for i in range(self.n_arrays)]

    def _read(self, first: int, extent: int) -> tuple[mx.array, mx.array]:
        """Return the keys and values in some slots."""
        slots, start = self.slots, min(self.packing.start, extent)
        if first < start == extent:
            return slots[-2][:, :, first:extent], slots[-1][:, :, first:extent]
        packed = [a[:, :, max(first, start) : extent] for a in slots[:_PACKED]]
        keys, values = self.packing.unpack(packed[:3]), self.packing.unpack(packed[3:])
        if first >= start:
            return keys, values
        early = [a[:, :, first:start] for a in slots[_PACKED:]]
        both = [mx.concatenate([*each], axis=2) for each in zip(early, (keys, values), strict=True)]
        return both[0], both[1]

    def _with_early_nodes(
        self, plan: TreePlan, rows: Sequence[mx.array], read: tuple[mx.array, mx.array]
    ) -> tuple[mx.array, mx.array]:
        """Return what was read, with the nodes of the first positions as they are.

        A node's slot may be after these positions, and its position is not.
        """
        early = (plan.offset < self.packing.start)[:, None, :, None]
        packed = self.packing.unpack(rows[:3]), self.packing.unpack(rows[3:_PACKED])
        each = zip(read, rows[_PACKED:], packed, strict=True)
        keys, values = (
            mx.put_along_axis(held, plan.whole.slots, mx.where(early, whole, rounded), axis=2)
            for held, whole, rounded in each
        )
        return keys, values

    def committed(self, slots: int, nodes: bool) -> tuple[mx.array, mx.array]:
        keys, values = self._read(0, slots)
        if nodes:
            of_tree = self.tree_nodes
            keys = mx.concatenate([keys, self.packing.unpack(of_tree[:3])], axis=2)
            values = mx.concatenate([values, self.packing.unpack(of_tree[3:_PACKED])], axis=2)
        return keys, values

    def grow(self, capacity: int) -> None:
        if self.used and self.capacity < capacity:
            each = zip(self.slots, self._sizes(capacity), strict=True)
            larger = [a if a.shape[2] >= size else grown(a, size) for a, size in each]
            self.buffers = *larger, *self.buffers[self.n_arrays :]

    def move(self, slots: mx.array) -> None:
        if nodes := self.tree_nodes:
            self.buffers = *_put(self.slots, slots, nodes), *(None,) * self.n_arrays

    @property
    def slot_bytes(self) -> int:
        """Bytes of one quantised slot of all rows."""
        return sum(a.nbytes // a.shape[2] for a in self.slots[:_PACKED])

    @property
    def early_slot_bytes(self) -> int:
        """Bytes of one slot of all rows that is read as it is; there are `start + 1` at most."""
        return sum(a.nbytes // a.shape[2] for a in self.slots[_PACKED:])

    def trimmed_bytes(self, slots: int) -> int:
        held = [min(a.shape[2], slots) for a in self.slots[_PACKED:]]
        return super().trimmed_bytes(slots) + self.early_slot_bytes * max(held, default=0)


def _put(slots: Sequence[mx.array], at: mx.array, rows: Sequence[mx.array]) -> list[mx.array]:
    """Write rows to their slots [B, 1, N, 1]; what lies beyond an array's end, to its last one."""
    sizes = {a.shape[2] for a in slots}
    found = {size: at if size == max(sizes) else mx.minimum(at, size - 1) for size in sizes}
    each = zip(slots, rows, strict=True)
    return [mx.put_along_axis(held, found[held.shape[2]], new, axis=2) for held, new in each]
