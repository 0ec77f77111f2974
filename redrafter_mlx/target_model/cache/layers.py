"""The caches of all layers of a target: which kind each layer has, and what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import mlx.core as mx

from redrafter_mlx.target_model.cache.layer_cache import LayerBuffers, LayerCache
from redrafter_mlx.target_model.cache.packed_cache import PackedCache, Packing
from redrafter_mlx.target_model.cache.plans import ring_size
from redrafter_mlx.target_model.cache.slots import SPARE_STEP, round_up
from redrafter_mlx.target_model.cache.window_cache import WindowCache
from redrafter_mlx.target_model.recurrent.state_cache import Recurrences, StateCache


class CacheLayers:
    """One cache for each layer.

    states:    of the layers that keep a recurrent state, by index
    windows:   sizes of the sliding windows of layers that attend to no more, by index
    whole:     whether those layers keep all positions
    packing:   how the layers that keep all positions quantise them; None if they do not
    rings:     the numbers of slots of those that do not, by the size of the window
    attention: the layers that keep keys and values
    recurrent: those that keep a recurrent state
    forgetful: those whose state is not that of a prefix: recurrent ones, and those that keep a
               sliding window
    kinds:     one layer of each size, which is full where the others are
    """

    def __init__(
        self,
        n_layers: int,
        states: Mapping[int, Recurrences] | None = None,
        windows: Mapping[int, int] | None = None,
        *,
        whole: bool = False,
        packing: Packing | None = None,
    ) -> None:
        self.states, self.windows, self.whole = states or {}, windows or {}, whole
        self.packing = packing
        self.layers = [self._layer(i) for i in range(n_layers)]
        self.attention = [layer for layer in self.layers if isinstance(layer, LayerCache)]
        self.recurrent = [layer for layer in self.layers if isinstance(layer, StateCache)]
        self.forgetful = [x for x in self.layers if isinstance(x, (StateCache, WindowCache))]
        kept = {} if whole else {size: ring_size(size) for size in self.windows.values()}
        self.rings = dict(sorted(kept.items()))
        self.kinds = list({layer.ring: layer for layer in self.attention}.values())

    def _layer(self, i: int) -> LayerCache | StateCache:
        window = self.windows.get(i)
        if i in self.states:
            return StateCache(self.states[i])
        if window is not None and not self.whole:
            return WindowCache(window)
        return LayerCache(window) if self.packing is None else PackedCache(self.packing, window)

    @property
    def layer_buffers(self) -> Sequence[LayerBuffers]:
        """The buffers of every layer."""
        return [layer.buffers for layer in self.layers]

    @layer_buffers.setter
    def layer_buffers(self, given: Sequence[LayerBuffers]) -> None:
        for layer, buffers in zip(self.layers, given, strict=True):
            layer.buffers = buffers

    @property
    def masked_windows(self) -> set[int]:
        """Sizes of the sliding windows that calls asked masks for."""
        return set().union(*(layer.windows for layer in self.attention))

    @property
    def buffers(self) -> list[mx.array]:
        """All arrays that hold state, for evaluation."""
        of_states = [a for state in self.recurrent for a in state.arrays]
        held = [a for layer in self.attention for a in layer.buffers]
        return [a for a in held if isinstance(a, mx.array)] + of_states

    @property
    def capacity(self) -> int:
        """T, the number of slots of each sequence."""
        return max([layer.capacity for layer in self.kinds], default=0)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.buffers)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states, which do not grow with the text."""
        return sum(a.nbytes for layer in self.recurrent for a in layer.arrays)

    @property
    def ring_bytes(self) -> Mapping[int, int]:
        """Bytes of one slot of all layers with a ring of so many slots, by that number.

        What quantised layers keep as it is of the first positions counts, too.
        """
        found = Counter[int]()
        for layer in self.attention:
            if layer.ring is not None:
                found[layer.ring] += layer.slot_bytes
            if isinstance(layer, PackedCache) and layer.packing.start:
                found[layer.packing.start + 1] += layer.early_slot_bytes
        return found

    @property
    def unpacked_slot_bytes(self) -> int:
        """Bytes of one slot of the largest quantised layer when it is dequantised."""
        packed = [layer for layer in self.attention if isinstance(layer, PackedCache)]
        return max((layer.unpacked_slot_bytes for layer in packed), default=0)

    def trimmed_size(self, slots: int) -> tuple[int, int]:
        """Return the bytes and the number of the buffers that `trim` leaves; computes nothing."""
        kept = round_up(slots, SPARE_STEP)
        count = sum(layer.n_arrays for layer in self.attention if layer.used)
        count += sum(len(layer.states) for layer in self.recurrent)
        return sum(layer.trimmed_bytes(kept) for layer in self.layers), count
