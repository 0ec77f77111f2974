"""Read the tensors of a GGUF file as MLX arrays, by the definitions of ggml's ggml-common.h.

Types in which every 32 weights share a scale stay quantised, in MLX's form: a weight is
scale * code + bias, or MLX's own MXFP4. Q6_K is dequantised, to float32.

`mx.load` reads half of the weights of Q4_K wrongly, rounds Q6_K to float16, and refuses Q5_K. It
also opens the file for writing, so it fails on a model that the user may only read.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from redrafter_mlx.weights.gguf.header import BITS, TensorInfo

GROUP_SIZE = 32
"""Number of weights that share a scale, in the types that stay quantised."""

# Layout of a block of each type; a plain number is a block of one.
_BLOCKS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "Q4_0": np.dtype([("scale", "<f2"), ("codes", "u1", 16)]),
    "Q4_1": np.dtype([("scale", "<f2"), ("min", "<f2"), ("codes", "u1", 16)]),
    "Q5_0": np.dtype([("scale", "<f2"), ("high", "u1", 4), ("codes", "u1", 16)]),
    "Q5_1": np.dtype([("scale", "<f2"), ("min", "<f2"), ("high", "u1", 4), ("codes", "u1", 16)]),
    "Q8_0": np.dtype([("scale", "<f2"), ("codes", "u1", 32)]),
    "Q4_K": np.dtype([("scale", "<f2"), ("min", "<f2"), ("scales", "u1", (3, 4)),
                      ("low", "u1", (4, 1, 32))]),
    "Q5_K": np.dtype([("scale", "<f2"), ("min", "<f2"), ("scales", "u1", (3, 4)),
                      ("high", "u1", (1, 32)), ("low", "u1", (4, 1, 32))]),
    "Q6_K": np.dtype([("low", "u1", (2, 2, 32)), ("high", "u1", (2, 1, 32)),
                      ("scales", "i1", 16), ("scale", "<f2")]),
    "MXFP4": np.dtype([("scale", "u1"), ("codes", "u1", 16)]),
}  # fmt: skip

_Blocks = npt.NDArray[Any]


def quantisation(kind: str) -> dict[str, int | str]:
    """Return how MLX quantises weights of a type in `BITS`: arguments of its functions."""
    return {"group_size": GROUP_SIZE, "bits": BITS[kind], "mode": _mode(kind)}


def _mode(kind: str) -> str:
    return "mxfp4" if kind == "MXFP4" else "affine"


def read_tensors(
    tensors: Mapping[str, TensorInfo], expanded: Container[str] = ()
) -> dict[str, mx.array]:
    """Read these tensors, all of a type in `READABLE`.

    A quantised `x.weight` is packed for MLX and comes with `x.scales` and, but for MXFP4,
    `x.biases`; of those in `expanded`, it is the float32 numbers. Raises OSError if a file cannot
    be read.
    """
    arrays: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        layout = _BLOCKS[tensor.type]
        count = tensor.nbytes // layout.itemsize
        blocks = np.fromfile(tensor.path, layout, count, offset=tensor.start)
        if tensor.type in BITS:
            codes, *scaling = _quantised(blocks, tensor.type)
            parts = (_pack(codes, BITS[tensor.type]), *scaling)
            stem = name.removesuffix(".weight")
            shaped = [array.reshape(*tensor.shape[:-1], -1) for array in parts]
            if name in expanded:
                arrays[name] = _expanded(shaped, tensor.type)
            else:
                arrays.update(
                    (f"{stem}.{part}", array)
                    for part, array in zip(("weight", "scales", "biases"), shaped, strict=False)
                )
        else:
            arrays[name] = _numbers(blocks, tensor.type).reshape(tensor.shape)
    return arrays


def _expanded(parts: list[mx.array], kind: str) -> mx.array:
    """Return the float32 numbers of packed weights with their scales and biases."""
    words, scales = parts[:2]
    biases = parts[2].astype(mx.float32) if len(parts) > 2 else None
    scales = scales if biases is None else scales.astype(mx.float32)  # MXFP4's are exponents
    return mx.dequantize(
        words, scales, biases, GROUP_SIZE, BITS[kind], _mode(kind), dtype=mx.float32
    )


def _pack(codes: mx.array, bits: int) -> mx.array:
    """Pack [groups, 32] uint8 codes as MLX's words, [groups, bits]: a bit stream, lowest first."""
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


def _quantised(blocks: _Blocks, kind: str) -> tuple[mx.array, ...]:
    """Return codes, scales and biases of a type in `BITS`: a weight is scale * code + bias.

    MXFP4 has no biases: a code is a float of four bits, and a scale the exponent of a power of two.

    Shapes:
      blocks: [n] of `_BLOCKS[kind]`
    Returns:
      [groups, 32] uint8, [groups], [groups]; float32 in K types, whose scales are products
    """
    if kind.endswith("_K"):
        return _codes_k(blocks), *_scales_k(blocks)
    codes, scale = _field(blocks, "codes"), _field(blocks, "scale")
    if kind == "Q8_0":
        return codes ^ 0x80, scale, scale * -128  # -128..127 become 0..255
    # Byte i holds the low bits of weights i and i + 16; bit i of `high` is weight i's high bit.
    codes = mx.concatenate([codes & 15, codes >> 4], axis=1)
    if kind == "MXFP4":
        return codes, scale
    if "high" in (blocks.dtype.names or ()):
        high = _field(blocks, "high")[:, :, None] >> mx.arange(8, dtype=mx.uint8)
        codes = codes | (high & 1).reshape(-1, GROUP_SIZE) << 4
    middle = 1 << (BITS[kind] - 1)
    return codes, scale, _field(blocks, "min") if kind.endswith("_1") else scale * -middle


def _numbers(blocks: _Blocks, kind: str) -> mx.array:
    """Return the numbers of any other type: plain ones as they are, those of Q6_K in float32."""
    if kind == "BF16":
        return mx.array(blocks).view(mx.bfloat16)
    return _q6_k(blocks) if kind == "Q6_K" else mx.array(blocks)


def _codes_k(blocks: _Blocks) -> mx.array:
    """Return the codes, [n * 8, 32].

    A row of bytes holds the low four bits of two groups, those of the first in the lower halves.
    """
    codes = _bits(blocks, "low", 4)
    if "high" in (blocks.dtype.names or ()):
        codes = codes.reshape(-1, 8, 32) | _bits(blocks, "high", 1) << 4
    return codes.reshape(-1, GROUP_SIZE)


def _scales_k(blocks: _Blocks) -> tuple[mx.array, mx.array]:
    """Return the scales and biases of each block's eight groups, [n * 8] each.

    They are the block's own times six-bit factors. The high bits of the last four factors are
    stored with the first four.
    """
    packed = _field(blocks, "scales")
    first, second, rest = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = mx.concatenate([first & 63, rest & 15 | first >> 6 << 4], axis=1)
    minima = mx.concatenate([second & 63, rest >> 4 | second >> 6 << 4], axis=1)
    scale, minimum = (_field(blocks, n).astype(mx.float32)[:, None] for n in ("scale", "min"))
    return (scale * scales).reshape(-1), (-minimum * minima).reshape(-1)


def _q6_k(blocks: _Blocks) -> mx.array:
    """Return the numbers of Q6_K.

    Half a block is two rows of low bits, of which the lower halves come first, and one row of high
    bits.
    """
    scale = _field(blocks, "scale").astype(mx.float32)[:, None]
    low = _field(blocks, "low")
    low = mx.concatenate([low & 15, low >> 4], axis=2)  # [n, 2, 4, 32]
    codes = (low | _bits(blocks, "high", 2) << 4).astype(mx.float32).reshape(-1, 16, 16) - 32
    return (scale * _field(blocks, "scales"))[..., None] * codes


def _bits(blocks: _Blocks, name: str, width: int) -> mx.array:
    """Split [..., 1, 32] bytes into [..., 8 // width, 32] codes, the lowest bits of all first."""
    shifts = mx.arange(0, 8, width, dtype=mx.uint8)[:, None]
    return _field(blocks, name) >> shifts & ((1 << width) - 1)


def _field(blocks: _Blocks, name: str) -> mx.array:
    return mx.array(np.ascontiguousarray(blocks[name]))
