"""Tensors of MTP heads in their layouts, under the names of the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.drafting.files.drafter_files import parameters_of
from redrafter_mlx.errors import DamagedFileError, UnsupportedModelError

_ATTENTION = "layers.0.self_attn."
_EXPERTS, _STACKED = "layers.0.mlp.experts.", "layers.0.mlp.switch_mlp."
_NEMOTRONS_EXPERTS = {"up_proj": "fc1", "down_proj": "fc2"}


def with_stacked_experts(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return tensors under the names of mlx-lm, whose experts are one array for each projection.

    Files have them fused (`experts.gate_up_proj` [E, 2I, H], Qwen3.5) or one by one (Qwen3-Next).
    """
    experts = {name.removeprefix(_EXPERTS): a for name, a in tensors.items() if _EXPERTS in name}
    out = {name: array for name, array in tensors.items() if _EXPERTS not in name}
    if "gate_up_proj" in experts:
        gate, up = mx.split(experts.pop("gate_up_proj"), 2, axis=-2)
        out |= {f"{_STACKED}gate_proj.weight": gate, f"{_STACKED}up_proj.weight": up}
        out[f"{_STACKED}down_proj.weight"] = experts.pop("down_proj")
    for rest in {name.partition(".")[2] for name in experts}:
        each = [experts[f"{e}.{rest}"] for e in range(len(experts)) if f"{e}.{rest}" in experts]
        out[f"{_STACKED}{rest}"] = mx.stack(each)
    return out


def with_latent_heads(tensors: dict[str, mx.array], layer: nn.Module) -> dict[str, mx.array]:
    """Return tensors with the two projections of mlx-lm in place of latent attention's `kv_b`."""
    out = dict(tensors)
    both = out.pop(f"{_ATTENTION}kv_b_proj.weight", None)
    if both is not None and is_latent(layer):
        attention = layer.self_attn
        heads = both.reshape(attention.num_heads, -1, both.shape[-1])
        keys, values = mx.split(heads, [attention.qk_nope_head_dim], axis=1)
        out[f"{_ATTENTION}embed_q.weight"] = keys.swapaxes(-1, -2)
        out[f"{_ATTENTION}unembed_out.weight"] = values
    return out


def is_latent(layer: nn.Module) -> bool:
    """Whether a layer's attention is latent: mlx-lm's adds its mask to scores, as an array."""
    return "embed_q" in layer.self_attn


def dequantised(
    tensors: dict[str, mx.array], network: nn.Module, path: Path
) -> dict[str, mx.array]:
    """Return the tensors with all weights as numbers; bits and group size follow from shapes."""
    sizes = {name: array.shape[-1] for name, array in parameters_of(network).items()}
    out = dict(tensors)
    for layer in [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]:
        weight, size = tensors.get(f"{layer}.weight"), sizes.get(f"{layer}.weight")
        if weight is None or size is None or f"{layer}.biases" not in tensors:
            raise DamagedFileError(
                f"{path}: tensor {layer}.scales belongs to weights that are not quantised as MLX "
                f"does by default; give a head in 16 bits"
            )
        scales, biases = out.pop(f"{layer}.scales"), out.pop(f"{layer}.biases")
        try:
            out[f"{layer}.weight"] = mx.dequantize(
                weight,
                scales,
                biases,
                group_size=size // scales.shape[-1],
                bits=32 * weight.shape[-1] // size,
            )
        except ValueError as error:
            raise DamagedFileError(f"{path}: tensor {layer}.weight: {error}") from None
    return out


def nemotrons_kinds(names: Sequence[str], path: Path) -> str:
    """Return the kind of each of a Nemotron head's layers: `*` attends, `E` chooses experts.

    Empty for a head in another layout. Raises UnsupportedModelError for layers of other kinds.
    """
    numbers = sorted({int(name.split(".")[1]) for name in names if ".mixer." in name})
    kinds = ""
    for i in numbers:
        if f"layers.{i}.mixer.q_proj.weight" in names:
            kinds += "*"
        elif f"layers.{i}.mixer.gate.weight" in names:
            kinds += "E"
        else:
            raise UnsupportedModelError(
                f"{path}: layer {i} of a Nemotron's MTP head neither attends nor chooses experts; "
                f"give another --drafter, such as lookup"
            )
    return kinds


def with_nemotrons_experts(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return tensors whose experts, one by one in files, are one array for each projection."""
    out = {name: array for name, array in tensors.items() if ".mixer.experts." not in name}
    parts: dict[str, dict[int, mx.array]] = {}
    for name in tensors.keys() - out.keys():
        layer, _, rest = name.partition(".experts.")
        number, projection, kind = rest.split(".")
        stacked = f"{layer}.switch_mlp.{_NEMOTRONS_EXPERTS[projection]}.{kind}"
        parts.setdefault(stacked, {})[int(number)] = tensors[name]
    return out | {name: mx.stack([of[e] for e in range(len(of))]) for name, of in parts.items()}
