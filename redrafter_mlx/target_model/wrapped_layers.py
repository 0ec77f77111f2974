"""What stands in a model's copy for its own modules: linear, rotary and recorded layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.cpu.door import SharedRotations
from redrafter_mlx.target_model.cache.layer_cache import AttentionCache

_P = ParamSpec("_P")
_R = TypeVar("_R")


class LinearView(nn.Linear):
    """A linear layer on the weight and bias of another one, with fewer nodes in its graph.

    The host builds that graph anew for every call. `nn.Linear` transposes its weight each time, and
    MLX folds the leading axes of [B, N, D] into one and unfolds them after the product: four nodes,
    of which one computes. Here `prepare` makes the transposed weight once, with a batch axis for a
    single sequence, so that only the product is left. It is the same product of the same numbers:
    the results are bit-identical.
    """

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which draws numbers
        for name in ("weight", "bias"):
            if name in layer:
                self[name] = layer[name]
        self._prepared: mx.array | None = None  # the weight that the others are views of
        self._for_batches: mx.array | None = None  # [D, E]
        self._for_one: mx.array | None = None  # [1, D, E]

    def __call__(self, x: mx.array) -> mx.array:
        one = x.ndim == 3 and x.shape[0] == 1
        weight = self._for_one if one else self._for_batches
        if weight is None or self._prepared is not self.weight:
            layer: mx.array = super().__call__(x)
            return layer
        return mx.addmm(self.bias, x, weight) if "bias" in self else x @ weight


def prepare(layers: Iterable[LinearView]) -> None:
    """Make the layers' views of their weights, which are brought into memory for that."""
    for layer in layers:
        layer._prepared = layer.weight
        layer._for_batches = layer.weight.T
        layer._for_one = layer._for_batches[None]
        mx.async_eval(layer._for_batches, layer._for_one)


class Rotations:
    """The rotary embeddings of one network.

    count:  number of rotary embeddings
    others: type names of embeddings that take no node positions
    """

    def __init__(self) -> None:
        self.count = 0
        self.others: set[str] = set()
        self._shared = SharedRotations()

    def wrap(self, rope: nn.Module) -> Callable[[mx.array, int | mx.array], mx.array]:
        """Wrap a rotary embedding so that it takes node positions."""
        self.count += 1
        return self._shared.rope(rope, NodeRope(rope))

    def sharing(self, call: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return a call of the network, in which all embeddings are given the same positions."""
        return self._shared.sharing(call)


class NodeRope:
    """A rotary embedding that also takes one position per node: offset [B, N]."""

    def __init__(self, rope: nn.Module) -> None:
        self._rope = rope

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate x [B, H, N, size].

        MLX's embedding takes one position per batch row, so nodes of different depth are folded
        into the batch axis.
        """
        if not isinstance(offset, mx.array) or offset.ndim < 2:
            plain: mx.array = self._rope(x, offset=offset)
            return plain
        B, H, N, size = x.shape
        folded = x.swapaxes(1, 2).reshape(B * N, H, 1, size)
        rotated: mx.array = self._rope(folded, offset=offset.reshape(-1))
        return rotated.reshape(B, N, H, size).swapaxes(1, 2)


class HiddenAsInput:
    """Replaces the backbone if the input is already the hidden state."""

    def __init__(self, backbone: nn.Module) -> None:
        self._backbone = backbone

    def __call__(self, *given: mx.array, **named: mx.array) -> mx.array:
        return given[0] if given else named["inputs"]

    def __getattr__(self, name: str) -> object:
        return getattr(self._backbone, name)


class NodeScaledLayer:
    """A layer that scales its queries by their positions, with one position per node.

    The backbone computes the scales of its call from one position per batch row.
    """

    def __init__(self, layer: Callable[..., mx.array], rope: Mapping[str, float]) -> None:
        self._layer = layer
        self._beta = rope["llama_4_scaling_beta"]
        self._span = rope["original_max_position_embeddings"]

    def __call__(
        self, x: mx.array, scale: mx.array, mask: object, cache: AttentionCache | None
    ) -> mx.array:
        at = getattr(cache, "offset", 0)
        if isinstance(at, mx.array) and at.ndim == 2:
            scale = 1 + self._beta * mx.log(1 + mx.floor(at / self._span))  # [B, N]
            scale = scale[:, None, :, None].astype(x.dtype)
        return self._layer(x, scale, mask, cache)

    def __getattr__(self, name: str) -> object:
        return getattr(self._layer, name)


class LayerRecorder:
    """A layer that stores its last input, or its last output, until `take`."""

    def __init__(self, layer: Callable[..., mx.array], *, output: bool = False) -> None:
        self._layer, self._output = layer, output
        self._seen: mx.array | None = None

    def __call__(self, x: mx.array, *args: object, **kwargs: object) -> mx.array:
        out = self._layer(x, *args, **kwargs)
        self._seen = out if self._output else x
        return out

    def __getattr__(self, name: str) -> object:
        return getattr(self._layer, name)

    def take(self) -> mx.array:
        """Return what is stored and drop it."""
        seen, self._seen = self._seen, None
        assert seen is not None, "the layer was not called"
        return seen


def recorded(
    backbone: Callable[..., mx.array], recorders: Sequence[LayerRecorder]
) -> Callable[..., tuple[list[mx.array], mx.array]]:
    """Return the backbone as a function that also returns what its recorders have stored."""

    def call(tokens: mx.array, cache: Sequence[object] | None) -> tuple[list[mx.array], mx.array]:
        out = backbone(tokens, cache=cache)
        return [recorder.take() for recorder in recorders], out

    return call
