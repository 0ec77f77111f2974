"""A model as its files store it, in any format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from redrafter_mlx.errors import DamagedFileError

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_ENDLESS = 2**53  # a context length that no model has


@dataclass(frozen=True)
class RawModel:
    """A model whose weights are not evaluated yet, and how to read its tokenizer.

    Reading a tokenizer can take as long as evaluating the weights, so both can be done at once.
    """

    model: nn.Module
    read_tokenizer: Callable[[], TokenizerWrapper]  # DamagedFileError or UnsupportedModelError
    model_type: str  # mlx-lm's name of the architecture
    fingerprint: str  # see TargetSource
    context_length: int | None  # in tokens, see `context_length`; None if the files name none
    stored: mx.Dtype | None = None  # that `auto` gives on a GPU; None leaves every array as it is
    licence: str | None = None
    earlier_fingerprint: str | None = None


def context_length(config: Mapping[str, object]) -> int | None:
    """Return a model's context length in tokens, prompt and answer together; None if unknown.

    It is `max_position_embeddings`, times the factor of a rope scaling that extends it. By
    transformers' definition, linear scaling and YaRN do; YaRN's factor applies to
    `original_max_position_embeddings`. For other kinds, the number already includes the scaling.
    Models that also read images have it in `text_config`.
    """
    length = config.get("max_position_embeddings")
    if not _is_length(length):
        text = config.get("text_config")
        return context_length(text) if isinstance(text, Mapping) else None
    scaling = {**config, **top_level_rope(config)}.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return length
    kind = scaling.get("rope_type", scaling.get("type"))
    factor = scaling.get("factor")
    if kind not in ("linear", "yarn") or not isinstance(factor, (int, float)):
        return length
    original = scaling.get("original_max_position_embeddings") if kind == "yarn" else None
    scaled = (original if _is_length(original) else length) * factor
    if not scaled < _ENDLESS:
        raise DamagedFileError(f"config.json has a rope scaling with the factor {factor!s:.20}")
    return max(length, int(scaled))


def is_unknown(error: Exception) -> bool:
    """Whether mlx-lm's error says that it has no such architecture; MLX's are about odd arrays."""
    return str(error).endswith(" not supported.")


def top_level_rope(config: Mapping[str, object]) -> dict[str, object]:
    """Return what `rope_parameters` holds, under the top-level keys that older files have.

    transformers 5 writes the rotary base and scaling there, where most of mlx-lm's architectures
    do not look. Empty without that key, and if it has an object for each type of layer. A
    `text_config` that has the key is returned with its own keys added.
    """
    found, text = _rope_keys(config), config.get("text_config")
    if isinstance(text, Mapping) and (inner := top_level_rope(text)):
        found["text_config"] = {**text, **inner}
    return found


def _rope_keys(config: Mapping[str, object]) -> dict[str, object]:
    nested = config.get("rope_parameters")
    if not isinstance(nested, Mapping) or any(isinstance(v, Mapping) for v in nested.values()):
        return {}
    given = {key: value for key, value in nested.items() if value is not None}
    found = {key: given[key] for key in ("rope_theta", "partial_rotary_factor") if key in given}
    kind = given.get("rope_type", given.get("type", "default"))
    scaling = None if kind == "default" else {**given, "rope_type": kind, "type": kind}
    return {**found, "rope_scaling": config.get("rope_scaling") or scaling}


def _is_length(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
