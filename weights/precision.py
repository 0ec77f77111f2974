"""The dtype of a loaded model, and whether its weights stay quantised.

| option                   | on a GPU                        | on a CPU                        |
|--------------------------|---------------------------------|---------------------------------|
| auto                     | as stored                       | float32; quantised weights are  |
|                          |                                 | dequantised exactly             |
| float16/bfloat16/float32 | this dtype; quantised weights   | this dtype; quantised weights   |
|                          | stay, their scales get it too   | are dequantised                 |
| quantize=4 or 8          | 4 or 8 bits, groups of 64; already quantised weights stay as they    |
|                          | are; the rows above give the dtype of floats                         |

Quantised weights (MLX's quantised matrix product) are the fastest on a GPU, the slowest on a CPU.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import dequantize_model

from redrafter_mlx.config import DType
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.device import backend
from redrafter_mlx.weights.fit.model_size import GROUP_SIZE

_BLOCK = 8192  # groups that are dequantised at once: few enough for a processor's cache


@dataclass(frozen=True)
class Precision:
    """Format of the weights in memory: name of the dtype, and bits of quantised weights or None."""

    dtype: str
    bits: int | None


def convert(
    model: nn.Module, dtype: DType, quantize: int | None, stored: mx.Dtype | None = None
) -> Precision:
    """Convert a model by the options (see the table above), without evaluating anything.

    stored: dtype that `auto` gives on a GPU; None leaves every array as it is
    Raises BadInputError if `quantize` contradicts already quantised weights, or fits no layer.
    """
    on_cpu = backend() == "cpu"
    bits = stored_bits(model)
    if quantize is not None and bits not in (None, quantize):
        raise BadInputError(
            f"quantize is {quantize}, but the model is quantised to {bits} bits already; "
            f"leave quantize out"
        )
    wanted = (mx.float32 if on_cpu else stored) if dtype == "auto" else getattr(mx, dtype)
    if bits is not None and on_cpu and quantize is None:
        _cast(model, mx.float32)
        dequantize_model(model)
    if wanted is not None:
        _cast(model, wanted)
    if quantize is not None and bits is None and not quantize_layers(model, quantize):
        raise BadInputError(no_layer_fits("quantize", quantize))
    return Precision(_dtype(model), stored_bits(model))


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast every float array, except those that the architecture excludes."""
    may_cast = getattr(model, "cast_predicate", lambda _: True)

    def cast(path: str, array: mx.array) -> mx.array:
        floating = mx.issubdtype(array.dtype, mx.floating)
        return array.astype(dtype) if floating and may_cast(path) else array

    model.update(tree_map_with_path(cast, model.parameters()))


def packed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that `dequantise` can compute, by path: of 4 or 8 bits."""
    return {
        path: module
        for path, module in model.named_modules()
        if "scales" in module and module.mode == "affine" and module.bits in (4, 8)
    }


def dequantise(model: nn.Module, packed: dict[str, nn.Module]) -> None:
    """Evaluate the weights that `convert` dequantises, to the numbers that MLX would give.

    MLX takes 10 to 27 ns for each weight on a CPU, so NumPy computes them, in 2.

    packed: what `packed_layers` returned before the conversion; emptied, as the memory is needed
    """
    layers = {
        path: module
        for path, module in model.named_modules()
        if path in packed and "scales" not in module
    }
    weights = {path: mx.zeros(module.weight.shape) for path, module in layers.items()}
    mx.async_eval(weights)  # new memory takes as long as the numbers
    for path, module in layers.items():
        unpack(packed.pop(path), weights[path])
        # In place, as a target that was made before shares the array.
        module.weight[...] = weights.pop(path).astype(module.weight.dtype)


def unpack(module: nn.Module, weights: mx.array) -> None:
    """Write the weights of a layer quantised to 4 or 8 bits into float32 `weights`."""
    groups = module.scales.size
    scales, biases, packed = (
        np.array(mx.contiguous(array), copy=False).reshape(groups, -1)
        for array in (
            module.scales.astype(mx.float32), module.biases.astype(mx.float32), module.weight
        )
    )  # fmt: skip
    codes = packed.view(np.uint8)
    out = np.array(weights, copy=False).reshape(groups, -1)  # a view: what it gets, weights get
    for begin in range(0, groups, _BLOCK):
        part = slice(begin, begin + _BLOCK)
        if module.bits == 8:
            out[part] = codes[part]
        else:
            np.bitwise_and(codes[part], 15, out=out[part, 0::2], casting="unsafe")
            np.right_shift(codes[part], 4, out=out[part, 1::2], casting="unsafe")
        out[part] *= scales[part]
        out[part] += biases[part]


def quantize_layers(model: nn.Module, bits: int) -> bool:
    """Quantise the layers whose rows divide into groups; return whether there is one."""
    own = getattr(model, "quant_predicate", None) or (lambda _path, _module: True)

    def how(path: str, module: nn.Module) -> bool | dict[str, int]:
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP_SIZE == 0
        chosen: bool | dict[str, int] = own(path, module) if fits else False
        return chosen

    nn.quantize(model, group_size=GROUP_SIZE, bits=bits, class_predicate=how)
    return stored_bits(model) is not None


def no_layer_fits(option: str, bits: int) -> str:
    """Return the error of a network that `quantize_layers` leaves as it is."""
    return f"{option} is {bits}, but no layer's rows divide into groups of {GROUP_SIZE}"


def stored_bits(model: nn.Module) -> int | None:
    """Return the bits that most quantised weights have; None if none is quantised."""
    sizes: Counter[int] = Counter()
    for module in model.modules():
        if "scales" in module and isinstance(bits := getattr(module, "bits", None), int):
            sizes[bits] += module.weight.nbytes
    return sizes.most_common(1)[0][0] if sizes else None


def _dtype(model: nn.Module) -> str:
    """Return the dtype of most float parameters, including the scales of quantised weights."""
    sizes: Counter[str] = Counter()
    for array in dict(tree_flatten(model.parameters())).values():
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[str(array.dtype).removeprefix("mlx.core.")] += array.size
    return sizes.most_common(1)[0][0]
