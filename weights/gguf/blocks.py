"""The numbers in GGUF's blocks, by the definitions of ggml's ggml-common.h and ggml-quants.c.

Types whose weights share a scale by 32 stay quantised, as MLX does it: a weight is
scale * code + bias. Of Q6_K the numbers themselves are computed, in float32.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

GROUP_SIZE = 32
"""Weights that share a scale in a type that stays quantised."""

BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5}
"""Bits of a weight in a type that stays quantised."""

# One block of each type; plain numbers are blocks of one.
BLOCKS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "Q4_0": np.dtype([("scale", "<f2"), ("codes", "u1", 16)]),
    "Q4_1": np.dtype([("scale", "<f2"), ("least", "<f2"), ("codes", "u1", 16)]),
    "Q5_0": np.dtype([("scale", "<f2"), ("high", "u1", 4), ("codes", "u1", 16)]),
    "Q5_1": np.dtype([("scale", "<f2"), ("least", "<f2"), ("high", "u1", 4), ("codes", "u1", 16)]),
    "Q8_0": np.dtype([("scale", "<f2"), ("codes", "u1", 32)]),
    "Q4_K": np.dtype([("scale", "<f2"), ("least", "<f2"), ("scales", "u1", (3, 4)),
                      ("low", "u1", (4, 1, 32))]),
    "Q5_K": np.dtype([("scale", "<f2"), ("least", "<f2"), ("scales", "u1", (3, 4)),
                      ("high", "u1", (1, 32)), ("low", "u1", (4, 1, 32))]),
    "Q6_K": np.dtype([("low", "u1", (2, 2, 32)), ("high", "u1", (2, 1, 32)),
                      ("scales", "i1", 16), ("scale", "<f2")]),
}  # fmt: skip

Blocks = npt.NDArray[Any]


def quantised(blocks: Blocks, kind: str) -> tuple[mx.array, mx.array, mx.array]:
    """Codes, scales and biases of a type in `BITS`: a weight is scale * code + bias.

    Shapes:
      blocks: [n] of `BLOCKS[kind]`
    Returns:
      [groups, 32] uint8, [groups], [groups]; float32 in K types, whose scales are products
    """
    if kind.endswith("_K"):
        return _codes_k(blocks), *_scales_k(blocks)
    codes, scale = _field(blocks, "codes"), _field(blocks, "scale")
    if kind == "Q8_0":
        return codes ^ 0x80, scale, scale * -128  # -128..127 become 0..255
    # Byte i holds weights i and i + 16, and bit i of the high ones is that of weight i.
    codes = mx.concatenate([codes & 15, codes >> 4], axis=1)
    if "high" in (blocks.dtype.names or ()):
        high = _field(blocks, "high")[:, :, None] >> mx.arange(8, dtype=mx.uint8)
        codes = codes | (high & 1).reshape(-1, GROUP_SIZE) << 4
    middle = 1 << (BITS[kind] - 1)
    return codes, scale, _field(blocks, "least") if kind.endswith("_1") else scale * -middle


def numbers(blocks: Blocks, kind: str) -> mx.array:
    """The numbers of any other type: plain ones in their own type, those of Q6_K in float32."""
    if kind == "BF16":
        return mx.array(blocks).view(mx.bfloat16)
    return _q6_k(blocks) if kind == "Q6_K" else mx.array(blocks)


def _codes_k(blocks: Blocks) -> mx.array:
    """[n * 8, 32]: a row of bytes holds the low four bits of two groups, the lower halves first."""
    codes = _bits(blocks, "low", 4)
    if "high" in (blocks.dtype.names or ()):
        codes = codes.reshape(-1, 8, 32) | _bits(blocks, "high", 1) << 4
    return codes.reshape(-1, GROUP_SIZE)


def _scales_k(blocks: Blocks) -> tuple[mx.array, mx.array]:
    """Scales and biases of eight groups, from six-bit factors whose high bits lie apart."""
    packed = _field(blocks, "scales")
    first, second, rest = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = mx.concatenate([first & 63, rest & 15 | first >> 6 << 4], axis=1)
    leasts = mx.concatenate([second & 63, rest >> 4 | second >> 6 << 4], axis=1)
    scale, least = (_field(blocks, n).astype(mx.float32)[:, None] for n in ("scale", "least"))
    return (scale * scales).reshape(-1), (-least * leasts).reshape(-1)


def _q6_k(blocks: Blocks) -> mx.array:
    """Half of a block is two rows of low bits, whose lower halves come first, and one of high."""
    scale = _field(blocks, "scale").astype(mx.float32)[:, None]
    low = _field(blocks, "low")
    low = mx.concatenate([low & 15, low >> 4], axis=2)  # [n, 2, 4, 32]
    codes = (low | _bits(blocks, "high", 2) << 4).astype(mx.float32).reshape(-1, 16, 16) - 32
    return (scale * _field(blocks, "scales"))[..., None] * codes


def _bits(blocks: Blocks, name: str, width: int) -> mx.array:
    """[..., 1, 32] bytes as [..., 8 // width, 32] codes, the lowest bits of all bytes first."""
    shifts = mx.arange(0, 8, width, dtype=mx.uint8)[:, None]
    return _field(blocks, name) >> shifts & ((1 << width) - 1)


def _field(blocks: Blocks, name: str) -> mx.array:
    return mx.array(np.ascontiguousarray(blocks[name]))
