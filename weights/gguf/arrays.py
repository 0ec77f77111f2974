"""Arrays of a GGUF file in the shapes and orders of mlx-lm's classes.

llama.cpp's converter permutes rows, drops axes and computes some parameters in advance. All of it
is undone on packed arrays too, as their rows stay whole.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import cast

import mlx.core as mx

from redrafter_mlx.weights.gguf.architectures.architecture import Architecture
from redrafter_mlx.weights.gguf.header import TensorInfo

Change = Callable[[mx.array, "Sizes"], mx.array]


class Sizes:
    """Whole numbers of a configuration."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config

    def __getitem__(self, key: str) -> int:
        return cast("int", self._config[key])


def as_in_mlx(
    arrays: Mapping[str, mx.array], architecture: Architecture, config: Mapping[str, object]
) -> dict[str, mx.array]:
    """Return the arrays as mlx-lm's class computes with them: see `Architecture`."""
    halved = architecture.pairs and not architecture.traditional
    tables = [_CHANGES, _PAIRS if halved else {}, _TILED if architecture.tiled else {}]
    sizes = Sizes(config)
    changed: dict[str, mx.array] = {}
    pieces: dict[str, dict[str, mx.array]] = defaultdict(dict)
    for name, array in arrays.items():
        module = _module(name)
        if architecture.adds_one and module.endswith("norm"):
            array = array - 1
        for change in [table[module] for table in tables if module in table]:
            array = change(array, sizes)
        if (whole := whole_of(name)) != name:
            pieces[whole][module] = array
            continue
        parts = parts_of(name)
        split = mx.split(array, len(parts), axis=-2) if len(parts) > 1 else [array]
        changed.update(zip(parts, split, strict=True))
    for whole, held in pieces.items():
        rows = mx.concatenate([held[part] for part in _JOINED[_module(whole)]], axis=-2)
        changed[whole] = rows.reshape(-1, rows.shape[-1])
    return changed


def expanded(tensors: Mapping[str, TensorInfo]) -> set[str]:
    """Return the tensors that cannot stay quantised, by mlx-lm's names: parts of one matrix.

    They can if all have the same type, and none is transposed.
    """
    types: dict[str, set[str]] = defaultdict(set)
    for name, tensor in tensors.items():
        types[whole_of(name)].add(tensor.type)
    return {
        name
        for name in tensors
        if (whole := whole_of(name)) != name
        and (len(types[whole]) > 1 or _module(whole) in _TRANSPOSED)
    }


def whole_of(name: str) -> str:
    """Return mlx-lm's name of the matrix that a tensor of a file is a part of, or the name."""
    module = _module(name)
    whole = next((whole for whole, parts in _JOINED.items() if module in parts), module)
    return name.replace(module, whole)


def _module(name: str) -> str:
    """Return the module of a layer, or the parameter that is in none."""
    return re.sub(r"^.*\blayers\.\d+\.|\.(weight|scales|biases|bias)$", "", name)


def parts_of(name: str) -> tuple[str, ...]:
    """Return mlx-lm's names of what is one tensor in a file, in the order of its rows."""
    for fused, parts in _SPLIT.items():
        if fused in name:
            return tuple(name.replace(fused, part) for part in parts)
    return (name,)


def _halves(array: mx.array, heads: int) -> mx.array:
    """Return rows [H * d, ...] in the order for rotation of halves instead of adjacent pairs."""
    rest = array.shape[1:]
    return array.reshape(heads, -1, 2, *rest).swapaxes(1, 2).reshape(-1, *rest)


def _grouped(array: mx.array, sizes: Sizes) -> mx.array:
    """Return rows of value heads by their key head: the file has the first value head of each.

    Two heads of keys with two of values each: v0k0 v0k1 v1k0 v1k1 become v0k0 v1k0 v0k1 v1k1.
    """
    keys, rest = sizes["linear_num_key_heads"], array.shape[1:]
    each = sizes["linear_num_value_heads"] // keys
    return array.reshape(each, keys, -1, *rest).swapaxes(0, 1).reshape(-1, *rest)


def _grouped_values(array: mx.array, sizes: Sizes) -> mx.array:
    """Group the rows of values, after those of queries and keys."""
    before = 2 * sizes["linear_num_key_heads"] * sizes["linear_key_head_dim"]
    return mx.concatenate([array[:before], _grouped(array[before:], sizes)])


def _decays(array: mx.array, _: Sizes) -> mx.array:
    """Return logarithms of decays [H] from [H, 1] in Mamba 2, or [C, S] in Mamba 1."""
    logarithms = (-array).log()
    return logarithms[:, 0] if array.shape[-1] == 1 else logarithms


def _kernels(array: mx.array, _: Sizes) -> mx.array:
    """Return a convolution's weights [..., K] as [C, K, 1], and its bias as it is."""
    return array if array.ndim == 1 else array.reshape(-1, array.shape[-1], 1)


def _halved(heads: str) -> Change:
    """Return the change to rows of as many heads as the configuration has under this key."""
    return lambda array, sizes: _halves(array, sizes[heads])


_PAIRS: Mapping[str, Change] = {
    f"{module}.{part}": _halved(heads)
    for module in ("self_attn", "attention")
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads"))
}
_STATE_SPACE: Mapping[str, Change] = {
    "A_log": _decays,
    "D": lambda array, _: array.reshape(-1),
    "norm": lambda array, _: array.reshape(-1),
    "conv1d": _kernels,
}
_CHANGES: Mapping[str, Change] = {
    **{f"{m}.{name}": c for name, c in _STATE_SPACE.items() for m in ("mamba", "mixer")},
    "self_attn.k_b_proj": lambda array, _: array.swapaxes(1, 2),
    "conv.conv": _kernels,
    **{f"self_attn.{part}_conv.conv": _kernels for part in "qkv"},
    "self_attn.A_log": lambda array, _: (-array).log().reshape(1, 1, -1, 1),
    "mlp.shared_expert_gate": lambda array, _: array.reshape(1, -1),
    "linear_attn.A_log": lambda array, _: (-array).log(),
    "linear_attn.conv1d": _kernels,
    "linear_attn.in_proj_ba": lambda array, sizes: (
        array.reshape(sizes["linear_num_key_heads"], 2, -1, array.shape[-1])
        .swapaxes(0, 1)
        .reshape(array.shape)
    ),
}
_TILED: Mapping[str, Change] = {
    **dict.fromkeys((f"linear_attn.{name}" for name in ("A_log", "dt_bias")), _grouped),
    **dict.fromkeys((f"linear_attn.in_proj_{part}" for part in "abz"), _grouped),
    **dict.fromkeys(("linear_attn.in_proj_qkv", "linear_attn.conv1d"), _grouped_values),
    "linear_attn.out_proj": lambda array, sizes: _grouped(array.T, sizes).T,
}
"""Each by mlx-lm's name of a module or a parameter of a layer."""

_JOINED = {
    "shared_mlp.input_linear": ("shared_mlp.gate_proj", "shared_mlp.up_proj"),
    "attention.query_key_value": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "self_attn.kv_b_proj": ("self_attn.k_b_proj", "self_attn.v_b_proj"),
}
"""Matrices of mlx-lm's classes whose rows, of each head if they have an axis of them, are several
tensors of a file."""

_TRANSPOSED = ("self_attn.kv_b_proj",)
"""Of these, those that have a transposed part."""

_SPLIT = {
    "experts.switch_glu.gate_up_proj": (
        "experts.switch_glu.gate_proj", "experts.switch_glu.up_proj",
    ),
    "linear_attn.in_proj_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
}  # fmt: skip
