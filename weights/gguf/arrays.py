"""Arrays of a GGUF file in the shapes and orders of mlx-lm's classes.

llama.cpp's converter permutes rows, drops axes and computes some parameters in advance. All of it
is undone on packed arrays too, as their rows stay whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import cast

import mlx.core as mx

from redrafter_mlx.weights.gguf.architectures.architecture import Architecture

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
    for name, array in arrays.items():
        module = re.sub(r"^.*\blayers\.\d+\.|\.(weight|scales|biases|bias)$", "", name)
        if architecture.adds_one and module.endswith("norm"):
            array = array - 1
        for change in [table[module] for table in tables if module in table]:
            array = change(array, sizes)
        parts = parts_of(name)
        split = mx.split(array, len(parts), axis=-2) if len(parts) > 1 else [array]
        changed.update(zip(parts, split, strict=True))
    return changed


def parts_of(name: str) -> tuple[str, ...]:
    """Return mlx-lm's names of what is one tensor in a file, in the order of its rows."""
    for fused, parts in _FUSED.items():
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


_PAIRS: Mapping[str, Change] = {
    "self_attn.q_proj": lambda array, sizes: _halves(array, sizes["num_attention_heads"]),
    "self_attn.k_proj": lambda array, sizes: _halves(array, sizes["num_key_value_heads"]),
}
_CHANGES: Mapping[str, Change] = {
    "conv.conv": lambda array, _: array if array.ndim == 1 else array[..., None],  # or its bias
    "mlp.shared_expert_gate": lambda array, _: array.reshape(1, -1),
    "linear_attn.A_log": lambda array, _: (-array).log(),
    "linear_attn.conv1d": lambda array, _: array[..., None],
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

_FUSED = {
    "experts.switch_glu.gate_up_proj": (
        "experts.switch_glu.gate_proj", "experts.switch_glu.up_proj",
    ),
    "linear_attn.in_proj_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
}  # fmt: skip
