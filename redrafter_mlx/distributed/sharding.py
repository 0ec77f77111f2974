"""Sharding a model's weights across the ranks, with mlx-lm's own code."""

from __future__ import annotations

from typing import Literal, cast

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.errors import UnsupportedModelError

Sharing = Literal["tensor", "pipeline"]

_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Model arguments that tensor parallelism divides by the number of ranks."""

_SPLIT_INPUTS = ("o_proj", "o_b_proj", "out_proj", "down_proj")
"""Layers whose inputs it divides; those of a quantised layer are divided in whole groups."""


def shard(model: nn.Module, model_type: str, group: mx.distributed.Group) -> Sharing:
    """Keep only this rank's share of a model that is not evaluated yet.

    Returns:
      "tensor" (a part of every layer) if the architecture has `shard` and its sizes are divisible;
      otherwise "pipeline" (some layers per rank) if it has `pipeline`

    Raises:
      UnsupportedModelError: naming the model, if neither is possible
    """
    whole = cast(nn.Module, getattr(model, "language_model", model))
    backbone = getattr(whole, "model", None)
    sharded, piped = getattr(whole, "shard", None), getattr(backbone, "pipeline", None)
    uneven = _uneven(whole, group.size())
    if sharded is not None and uneven is None:
        sharded(group)
        return "tensor"
    if piped is not None:
        piped(group)
        return "pipeline"
    if sharded is not None:
        raise UnsupportedModelError(
            f"{model_type} cannot be shared by {group.size()} ranks: {uneven} does not divide by "
            f"{group.size()}; start another number of ranks"
        )
    raise UnsupportedModelError(
        f"{model_type} cannot be shared by ranks: mlx-lm has neither tensor nor pipeline "
        f"parallelism for it; run it on one machine"
    )


def _uneven(model: nn.Module, ranks: int) -> str | None:
    """Return the first size, after its name, that the number of ranks does not divide."""
    args = getattr(model, "args", None)
    sizes = {name: getattr(args, name, None) for name in _DIVIDED}
    for path, module in model.named_modules():
        if path.endswith(_SPLIT_INPUTS) and "scales" in module:
            sizes[f"{path}'s group count"] = module["scales"].shape[-1]
    return next((f"{name} {n}" for name, n in sizes.items() if n and n % ranks), None)
