"""mlx-lm's own model and cache on a plain text: the reference for trees."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from redrafter_mlx.speculation.sampling import log_softmax


def sequential_log_probs(model: nn.Module, text: list[int], start: int, rows: int) -> mx.array:
    """Return log-probabilities [P, V] after each token of `text` from `start` - 1 on.

    The tokens before are read in one call, these P tokens in calls of `rows` query rows. The
    difference between row counts is the noise of the arithmetic: kernels for one query row and for
    several round differently.
    """
    cache = make_prompt_cache(model)
    if start > 1:
        mx.eval(model(mx.array([text[: start - 1]]), cache=cache))
    found = []
    for at in range(start - 1, len(text), rows):
        found.append(log_softmax(model(mx.array([text[at : at + rows]]), cache=cache)[0]))
        mx.eval(found[-1])
    return mx.concatenate(found, axis=0)
