"""Layers with a sliding window, from a model's configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_PATTERNS = {
    "cohere2": 4, "exaone4": 0, "gemma3": 6, "gemma3_text": 6, "gemma3n": 0, "gemma3n_text": 0,
    "gemma4": 5, "gemma4_text": 5, "gpt_oss": 2, "llama": 0, "ministral3": 0, "mistral": 0,
    "mistral3": 0, "olmo3": 0,
}  # fmt: skip
"""Architectures whose layers keep windows in mlx-lm. If the configuration does not say which do:
all but every such one, or none for 0."""


class Windows(NamedTuple):
    """Number of layers with a sliding window, and its size."""

    layers: int
    size: int


NO_WINDOWS = Windows(0, 0)


def windows_of(config: Mapping[str, object], layers: int) -> Windows:
    """Return how many of the layers keep a window alone; none where that is not known."""
    size, kind = config.get("sliding_window"), config.get("model_type")
    if type(size) is not int or size <= 0 or kind not in _PATTERNS:
        return NO_WINDOWS
    kinds, pattern = config.get("layer_types"), config.get("sliding_window_pattern")
    if isinstance(kinds, list):
        return Windows(kinds[:layers].count("sliding_attention"), size)
    if isinstance(pattern, str) and pattern:  # such as LLLG
        return Windows(sum(pattern[i % len(pattern)] == "L" for i in range(layers)), size)
    every = pattern if type(pattern) is int else _PATTERNS[str(kind)]
    return Windows(layers - layers // every if every > 0 else 0, size)
