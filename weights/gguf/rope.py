"""Rope scaling of the model in a GGUF file, as `rope_scaling` of config.json.

The scalings of Llama 3.1 and of Phi 3 are tensors of factors, one for each pair of dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np
from mlx_lm.models.rope_utils import Llama3RoPE

from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.weights.gguf.architectures.architecture import Architecture
from redrafter_mlx.weights.gguf.config import unsupported
from redrafter_mlx.weights.gguf.header import GGUFHeader
from redrafter_mlx.weights.gguf.keys import Keys
from redrafter_mlx.weights.gguf.tensors import read_tensors

_LLAMA3_FACTORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

FACTORS = (_LLAMA3_FACTORS, _LONG, _SHORT)
"""Names of tensors that are no parameters of the model."""

_LLAMA3: dict[str, object] = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def rope_scaling(
    header: GGUFHeader, architecture: Architecture, config: Mapping[str, object]
) -> dict[str, object] | None:
    """Return the scaling; None if there is none.

    As in llama.cpp, a file that only names a factor is scaled linearly.

    Raises:
      UnsupportedModelError: a scaling that mlx-lm's class does not apply, or factors of another one
      DamagedFileError: factors of another shape
    """
    keys = Keys(header, header.get("general.architecture", str))
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    scaling: dict[str, object] | None = None
    if kind == "yarn":
        scaling = _yarn(keys, factor)
    elif kind == "linear" and factor not in (0, 1):
        scaling = {"type": "linear", "factor": factor}
    elif _LLAMA3_FACTORS in header.tensors and "proportional" in architecture.scalings:
        factors = _factors(header, _LLAMA3_FACTORS, keys.head_dim // 2)
        share = float(np.mean(factors == 1))  # of dimensions that are rotated; others have 1e30
        scaling = {"type": "proportional", "partial_rotary_factor": share}
    elif _LLAMA3_FACTORS in header.tensors:
        scaling = _llama3(header, keys.head_dim, keys.number("rope.freq_base", 10000.0))
    elif _LONG in header.tensors:
        half = keys.whole("rope.dimension_count", keys.head_dim) // 2
        long, short = (_factors(header, name, half).tolist() for name in (_LONG, _SHORT))
        scaling = {"type": "longrope", "long_factor": long, "short_factor": short}
    elif kind not in ("none", "linear"):
        scaling = {"type": kind}
    found = None if scaling is None else scaling.get("type", scaling.get("rope_type"))
    if scaling is not None and "mscale" in scaling:
        found = f"{found} with yarn_log_multiplier"
    if found is not None and found not in architecture.scalings:
        raise unsupported(
            header, f"{config['model_type']} in GGUF with {found} rope scaling is not read"
        )
    return scaling


def _yarn(keys: Keys, factor: float) -> dict[str, object]:
    """Return YaRN's parameters.

    Raises UnsupportedModelError if the file scales attention by another factor than YaRN's, and
    DamagedFileError if it has no factor.
    """
    if factor <= 0:
        raise DamagedFileError(f"{keys.header.path}: yarn rope scaling by the factor {factor}")
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if keys.number(f"rope.scaling.{key}", 1.0) != 1.0:
            raise unsupported(keys.header, f"YaRN with {key} is not read")
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if keys.architecture == "deepseek2":  # whose files have a tenth of it
        multiplier *= 10
    return {
        **({"mscale": multiplier, "mscale_all_dim": multiplier} if multiplier else {}),
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.whole(
            "rope.scaling.original_context_length", keys.whole("context_length")
        ),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _llama3(header: GGUFHeader, dims: int, base: float) -> dict[str, object]:
    """Return the scaling of Llama 3.1 and later; a GGUF file holds only the resulting factors.

    Raises UnsupportedModelError if the file's factors are not those of this scaling.
    """
    factors = _factors(header, _LLAMA3_FACTORS, dims // 2)
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
    scaled = Llama3RoPE(dims, base=base, scaling_config=scaling)._freqs
    wanted = base ** (mx.arange(0, dims, 2) / dims) * mx.array(factors)
    if not mx.allclose(scaled, wanted, rtol=1e-3, atol=0).item():
        raise unsupported(header, f"the factors in {_LLAMA3_FACTORS} are not Llama 3's")
    return scaling


def _factors(header: GGUFHeader, name: str, count: int) -> np.ndarray:
    """Return a tensor of factors; raises DamagedFileError if it does not have this many."""
    tensor = header.tensors.get(name)
    if tensor is None or tensor.type != "F32" or tensor.shape != (count,):
        shape = None if tensor is None else tensor.shape
        raise DamagedFileError(f"{header.path}: tensor {name} has shape {shape}")
    return np.array(read_tensors({"factors": tensor})["factors"])
