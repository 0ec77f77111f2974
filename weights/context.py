"""How many tokens a model was made for, prompt and answer together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard


def context_length(config: Mapping[str, object]) -> int | None:
    """The context length that a model's configuration names, None if it names none.

    `max_position_embeddings`, times the factor of a rope scaling that is meant to go beyond it:
    transformers says so of linear scaling and of YaRN, where the factor counts from
    `original_max_position_embeddings`. For the other kinds the number includes the scaling.
    """
    length = config.get("max_position_embeddings")
    if not _is_whole(length):
        return None
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return length
    kind = scaling.get("rope_type", scaling.get("type"))
    factor = scaling.get("factor")
    if kind not in ("linear", "yarn") or not isinstance(factor, (int, float)):
        return length
    original = scaling.get("original_max_position_embeddings") if kind == "yarn" else None
    return max(length, int((original if _is_whole(original) else length) * factor))


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
