"""One layer's keys and values in 8 or 4 bits, in the layout of mlx-lm's `QuantizedKVCache`.

The numbers of one position are quantised alone, when they are written, so they are the same
whichever call wrote them: a prompt's chunk, a plain step, or a tree of which the position was a
node. Every query row reads quantised keys and values, its own position's too. So a text does not
depend on the chunks in which its prompt was read, nor on what was kept of earlier ones. (mlx-lm's
loop reads a prompt's first chunk before it quantises it.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from redrafter_mlx.target_model.cache.layer_cache import LayerCache, finite_drafts
from redrafter_mlx.target_model.cache.plans import PromptSpan, TreePlan

IN_ATTENTION = {"cpu": False, "apple": True, "cuda": False}
"""Whether attention of trees multiplies by quantised keys and values, as mlx-lm's does. They are
dequantised for a call otherwise, one layer after the other, and for prompts always: MLX's products
with quantised matrices take a CPU up to four times as long, and their attention holds the scores of
all rows at once."""

_GROUPS = (64, 32)
"""Numbers that share a scale and a bias: mlx-lm's default, or what divides heads of 96."""


class Packing(NamedTuple):
    """How the keys and values of layers that keep all positions are quantised.

    bits:  of a number, 8 or 4
    group: number of numbers of a head that share a scale and a bias
    taken: whether the model's attention takes them quantised, as mlx-lm's function does
    in_attention: whether that of trees is given them so
    """

    bits: int
    group: int
    taken: bool = False
    in_attention: bool = False

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
      buffers: words, scales and biases of the keys and of the values, [B, K, T, ...]; and the same
               of the last tree's nodes

    group_size: of the packing; mlx-lm's attention reads it
    """

    n_arrays = 6

    def __init__(self, packing: Packing, window: int | None = None) -> None:
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
        scales = [a for a in self.slots if a.dtype != mx.uint32][::2]
        return sum(a.nbytes // a.shape[2] * self.packing.group for a in scales)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write this call's keys and values [B, K, n, head size]; return all it may attend to.

        Those are `Packed`, if this call's attention takes them.
        """
        plan = self.plan
        assert plan is not None
        if isinstance(plan, TreePlan) and keys.shape[2] > 1:
            keys, values = finite_drafts(keys, values)
        rows = (*self.packing.pack(keys), *self.packing.pack(values))
        if isinstance(plan, PromptSpan):
            return self._unpacked(self._append(plan, rows))
        read = self._write(plan, rows)
        if self.packing.in_attention:
            return cast("tuple[mx.array, mx.array]", (tuple(read[:3]), tuple(read[3:])))
        return self._unpacked(read)

    def _append(self, plan: PromptSpan, rows: Sequence[mx.array]) -> list[mx.array]:
        """Write a prompt's rows; return the slots that it reads."""
        blank, first = self._blanks(plan.capacity, rows), plan.first(self.window)
        written = [
            mx.slice_update(held, new, plan.at, axes=(2,))
            for held, new in zip(blank, rows, strict=True)
        ]
        self.buffers = *written, *self.buffers[self.n_arrays :]
        return [a[:, :, first : plan.extent] for a in written]

    def _write(self, plan: TreePlan, rows: Sequence[mx.array]) -> list[mx.array]:
        """Write a tree's rows, and before them the last tree's; return the slots that it reads."""
        here, nodes = plan.whole, self.tree_nodes
        written = self._blanks(here.capacity, rows)
        if here.moves is not None:
            each = zip(written, nodes, strict=True)
            written = [mx.put_along_axis(held, here.moves, new, axis=2) for held, new in each]
        each = zip(written, rows, strict=True)
        written = [mx.put_along_axis(held, here.slots, new, axis=2) for held, new in each]
        self.buffers = *written, *(rows if plan.keep else (None,) * self.n_arrays)
        return [a[:, :, : here.extent] for a in written]

    def _blanks(self, capacity: int, rows: Sequence[mx.array]) -> list[mx.array]:
        """Return the slots; empty ones for rows like these, if there are none."""
        if self.used:
            return self.slots
        return [mx.zeros((*a.shape[:2], capacity, a.shape[3]), a.dtype) for a in rows]

    def _unpacked(self, arrays: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        """Return the keys and values in arrays of some slots."""
        return self.packing.unpack(arrays[:3]), self.packing.unpack(arrays[3:])
