"""The target's hidden states for the corpus: teacher-forced, checked, converted.

They keep the target's type. NumPy has no bfloat16, so NumPy arrays hold the same values in float32;
on disk they are bfloat16 again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import mlx.core as mx
import numpy as np

from redrafter_mlx.decoding.cache.prefix_cache import common_prefix
from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.runtime.device import dtype_name
from redrafter_mlx.target_model.model import Target


def teacher_forced_states(
    target: Target, texts: Iterable[tuple[Sequence[int], int]]
) -> Iterator[np.ndarray]:
    """Yield the states [tokens - index, C] that chose each text's tokens from an index >= 1 on.

    A prefix that a text shares with the previous text is not computed again, unless the target
    keeps recurrent states.
    """
    cache = target.mlx_lm_caches()
    before: Sequence[int] = []
    for text, index in texts:
        tokens = text[:-1]  # nothing follows the last one
        if not tokens:
            yield to_host(mx.zeros((0, target.context_size), target.dtype))
            continue
        start = min(common_prefix(before, tokens), index - 1)
        if target.states:  # which cannot be cut
            cache, start = target.mlx_lm_caches(), 0
        else:
            for layer in cache:
                layer.trim(layer.offset - start)
        hidden = target.hidden(mx.array([tokens[start:]], mx.int32), cache)[0, index - 1 - start :]
        mx.eval(hidden, [layer.state for layer in cache])
        before = tokens
        yield check_finite(to_host(hidden), target)


def to_host(array: mx.array) -> np.ndarray:
    """Return the same values as a NumPy array; bfloat16 becomes float32."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def host_size(dtype: mx.Dtype) -> int:
    """Return the bytes of one number of type `dtype` after `to_host`."""
    return 4 if dtype == mx.bfloat16 else dtype.size


def check_finite(states: np.ndarray, target: Target) -> np.ndarray:
    """Return the states [..., C] of a target, unchanged.

    Raises UnsupportedModelError, naming the layer, if one is infinite or not a number.
    """
    if not np.isfinite(states).all():
        names = [f"the input of layer {i}" for i in target.context_layers] + ["the last norm"]
        parts = np.split(states, len(names), axis=-1)
        name = next(n for n, p in zip(names, parts, strict=True) if not np.isfinite(p).all())
        kind = dtype_name(target.dtype)
        remedy = (
            "load it with --dtype bfloat16 or float32"
            if kind == "float16"
            else "its weights may be damaged"
        )
        raise UnsupportedModelError(
            f"{target.model_type} computes values in {name} that are not finite in {kind}, which "
            f"no drafter can be trained on; {remedy}"
        )
    return states
