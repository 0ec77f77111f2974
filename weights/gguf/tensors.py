"""The tensors of a GGUF file as MLX arrays, equal to what ggml's own definitions give.

`mx.load` reads half of the weights of Q4_K wrongly, rounds Q6_K to float16, and refuses Q5_K. It
also opens the file for writing, so it fails on a model that the user may only read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np

from redrafter_mlx.weights.gguf.blocks import BITS, BLOCKS, Blocks, numbers, quantised
from redrafter_mlx.weights.gguf.header import TensorInfo

READABLE = tuple(BLOCKS)


def read_tensors(path: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, mx.array]:
    """Those tensors of the file, all of them of a type in `READABLE`.

    A quantised `x.weight` is packed for MLX and comes with `x.scales` and `x.biases`. Raises
    OSError where the file cannot be read.
    """
    arrays: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        blocks = _read_blocks(path, tensor)
        if tensor.type in BITS:
            codes, *scaling = quantised(blocks, tensor.type)
            parts = (_pack(codes, BITS[tensor.type]), *scaling)
            stem = name.removesuffix(".weight")
            for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
                arrays[f"{stem}.{part}"] = array.reshape(*tensor.shape[:-1], -1)
        else:
            arrays[name] = numbers(blocks, tensor.type).reshape(tensor.shape)
    return arrays


def _read_blocks(path: Path, tensor: TensorInfo) -> Blocks:
    block = BLOCKS[tensor.type]
    return np.fromfile(path, block, tensor.nbytes // block.itemsize, offset=tensor.start)


def _pack(codes: mx.array, bits: int) -> mx.array:
    """[groups, 32] uint8 as MLX's words, [groups, bits]: a stream of bits, the lowest first."""
    if bits == 8:
        return codes.view(mx.uint32)
    if bits == 4:
        return (codes[:, ::2] | codes[:, 1::2] << 4).view(mx.uint32)
    assert bits == 5, bits
    c = [codes[:, i::8] for i in range(8)]
    packed = [
        c[0] | c[1] << 5,
        c[1] >> 3 | c[2] << 2 | c[3] << 7,
        c[3] >> 1 | c[4] << 4,
        c[4] >> 4 | c[5] << 1 | c[6] << 6,
        c[6] >> 2 | c[7] << 3,
    ]  # eight codes in five bytes
    return mx.stack(packed, axis=-1).reshape(len(codes), -1).view(mx.uint32)
