"""The numbers in GGUF's blocks, by the definitions of ggml's ggml-common.h and ggml-quants.c.

Types whose weights share a scale by 32 stay quantised, as MLX does it: a weight is
scale * code + bias. Of the other types the numbers themselves are computed, in float32.
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
    "Q2_K": np.dtype([("scales", "u1", 16), ("low", "u1", (2, 1, 32)),
                      ("scale", "<f2"), ("least", "<f2")]),
    "Q3_K": np.dtype([("high", "u1", (1, 32)), ("low", "u1", (2, 1, 32)),
                      ("scales", "u1", 12), ("scale", "<f2")]),
    "Q4_K": np.dtype([("scale", "<f2"), ("least", "<f2"), ("scales", "u1", (3, 4)),
                      ("low", "u1", (4, 1, 32))]),
    "Q5_K": np.dtype([("scale", "<f2"), ("least", "<f2"), ("scales", "u1", (3, 4)),
                      ("high", "u1", (1, 32)), ("low", "u1", (4, 1, 32))]),
    "Q6_K": np.dtype([("low", "u1", (2, 2, 32)), ("high", "u1", (2, 1, 32)),
                      ("scales", "i1", 16), ("scale", "<f2")]),
    "IQ4_NL": np.dtype([("scale", "<f2"), ("codes", "u1", 16)]),
    "IQ4_XS": np.dtype([("scale", "<f2"), ("high", "<u2"), ("scales", "u1", 4),
                        ("codes", "u1", (8, 16))]),
}  # fmt: skip

_UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the 16 codes of IQ4_NL and IQ4_XS stand for."""

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
    """The numbers of any other type, [n, numbers of a block].

    Plain numbers keep their type; those of blocks are float32.
    """
    if kind == "BF16":
        return mx.array(blocks).view(mx.bfloat16)
    if kind in ("F32", "F16"):
        return mx.array(blocks)
    scale = _field(blocks, "scale").astype(mx.float32)[:, None]
    of_type = {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs}
    return of_type[kind](blocks, scale).reshape(len(blocks), -1)


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


def _q2_k(blocks: Blocks, scale: mx.array) -> mx.array:
    codes = _bits(blocks, "low", 2).reshape(-1, 16, 16)
    scales, least = _field(blocks, "scales"), _field(blocks, "least").astype(mx.float32)[:, None]
    return (scale * (scales & 15))[..., None] * codes - (least * (scales >> 4))[..., None]


def _q3_k(blocks: Blocks, scale: mx.array) -> mx.array:
    """Of a weight, the third bit is high where 4 is not to be subtracted."""
    codes = _bits(blocks, "low", 2).reshape(-1, 8, 32) | _bits(blocks, "high", 1) << 2
    packed = _field(blocks, "scales")
    low = mx.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = packed[:, None, 8:] >> mx.array([[0], [2], [4], [6]], mx.uint8) & 3
    scales = (low | high.reshape(-1, 16) << 4).astype(mx.float32) - 32
    return (scale * scales)[..., None] * (codes.reshape(-1, 16, 16).astype(mx.float32) - 4)


def _q6_k(blocks: Blocks, scale: mx.array) -> mx.array:
    """A half of a block: two rows of low bits, whose lower halves come first, and one of high."""
    low = _field(blocks, "low")
    low = mx.concatenate([low & 15, low >> 4], axis=2)  # [n, 2, 4, 32]
    codes = (low | _bits(blocks, "high", 2) << 4).astype(mx.float32).reshape(-1, 16, 16) - 32
    return (scale * _field(blocks, "scales"))[..., None] * codes


def _iq4_nl(blocks: Blocks, scale: mx.array) -> mx.array:
    return scale * _uneven(_field(blocks, "codes"))


def _iq4_xs(blocks: Blocks, scale: mx.array) -> mx.array:
    high = _field(blocks, "high")[:, None] >> mx.arange(0, 16, 2, dtype=mx.uint16) & 3
    packed = _field(blocks, "scales")[..., None] >> mx.array([0, 4], mx.uint8) & 15
    scales = (packed.reshape(-1, 8) | high.astype(mx.uint8) << 4).astype(mx.float32) - 32
    return (scale * scales)[..., None] * _uneven(_field(blocks, "codes"))


def _uneven(codes: mx.array) -> mx.array:
    """[..., 16] bytes: the numbers of their lower halves, then those of the upper ones."""
    values = mx.array(_UNEVEN, mx.float32)
    return values[mx.concatenate([codes & 15, codes >> 4], axis=-1)]


def _bits(blocks: Blocks, name: str, width: int) -> mx.array:
    """[..., 1, 32] bytes as [..., 8 // width, 32] codes, the lowest bits of all bytes first."""
    shifts = mx.arange(0, 8, width, dtype=mx.uint8)[:, None]
    return _field(blocks, name) >> shifts & ((1 << width) - 1)


def _field(blocks: Blocks, name: str) -> mx.array:
    return mx.array(np.ascontiguousarray(blocks[name]))
