"""The tensors of a GGUF file as MLX arrays, equal to those of `mx.load`.

`mx.load` opens the file for writing, so it fails on a model that the user may only read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from redrafter_mlx.weights.gguf_header import TensorInfo

GROUP_SIZE = 32
"""Weights that share a scale in a type that stays quantised."""

BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
"""Bits of a weight in a type that stays quantised."""

# One block of each type, as in ggml's ggml-common.h; plain numbers are blocks of one.
_BLOCKS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "Q4_0": np.dtype([("scale", "<f2"), ("codes", "u1", 16)]),
    "Q4_1": np.dtype([("scale", "<f2"), ("least", "<f2"), ("codes", "u1", 16)]),
    "Q8_0": np.dtype([("scale", "<f2"), ("codes", "u1", 32)]),
    "Q6_K": np.dtype([("low", "u1", (2, 2, 32)), ("high", "u1", (2, 1, 32)),
                      ("scales", "i1", 16), ("scale", "<f2")]),
}  # fmt: skip

READABLE = tuple(_BLOCKS)

Blocks = npt.NDArray[Any]


def read_tensors(path: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, mx.array]:
    """Those tensors of the file, all of them of a type in `READABLE`.

    A quantised `x.weight` is packed for MLX and comes with `x.scales` and `x.biases`. Raises
    OSError where the file cannot be read.
    """
    arrays: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        blocks = _read_blocks(path, tensor)
        if tensor.type in BITS:
            parts = _quantised(blocks, tensor.type)
            stem = name.removesuffix(".weight")
            for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
                arrays[f"{stem}.{part}"] = array.reshape(*tensor.shape[:-1], -1)
        else:
            values = _q6_k(blocks) if tensor.type == "Q6_K" else mx.array(blocks)
            arrays[name] = values.reshape(tensor.shape)
    return arrays


def _read_blocks(path: Path, tensor: TensorInfo) -> Blocks:
    block = _BLOCKS[tensor.type]
    return np.fromfile(path, block, tensor.nbytes // block.itemsize, offset=tensor.start)


def _quantised(blocks: Blocks, kind: str) -> tuple[mx.array, mx.array, mx.array]:
    """Codes, scales and biases: a weight is scale * code + bias.

    Shapes:
      blocks: [n] of `_BLOCKS[kind]`
    Returns:
      [n, 4 or 8] uint32, [n] float16, [n] float16
    """
    codes, scale = _field(blocks, "codes"), _field(blocks, "scale")
    if kind == "Q8_0":
        unsigned = codes ^ 0x80  # -128..127 become 0..255
        return unsigned.view(mx.uint32), scale, scale * -128
    # Byte i of the file holds weights i and i + 16; byte i of MLX holds weights 2 i and 2 i + 1.
    weights = mx.concatenate([codes & 15, codes >> 4], axis=1)
    packed = weights[:, ::2] | weights[:, 1::2] << 4
    bias = _field(blocks, "least") if kind == "Q4_1" else scale * -8
    return packed.view(mx.uint32), scale, bias


def _q6_k(blocks: Blocks) -> mx.array:
    """Six-bit weights as float16, [n, 256].

    A half of a block is four runs of 32 weights. Two rows of bytes hold their low four bits, the
    lower halves of both rows first; one row holds their high two bits.
    """
    low, high = _field(blocks, "low"), _field(blocks, "high")
    low = mx.concatenate([low & 15, low >> 4], axis=2)  # [n, 2, 4, 32]
    high = high >> mx.array([[0], [2], [4], [6]], mx.uint8) & 3  # [n, 2, 4, 32]
    codes = (low | high << 4).astype(mx.float32).reshape(-1, 16, 16) - 32
    scales = _field(blocks, "scale").astype(mx.float32)[:, None] * _field(blocks, "scales")
    return (scales[..., None] * codes).astype(mx.float16)


def _field(blocks: Blocks, name: str) -> mx.array:
    return mx.array(np.ascontiguousarray(blocks[name]))
