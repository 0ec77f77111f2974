"""mlx-lm's own model and cache on a plain text: the reference for trees."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.speculation.sampling import log_softmax
from redrafter_mlx.target_model.cache.packed_cache import Packing
from redrafter_mlx.target_model.cache.plain import plain_caches

CHUNK = 2048
"""Number of prompt tokens in one call, as in mlx-lm's loop. Of these calls only the cache is
computed, no logits."""

LAST = 64
"""Maximum number of prompt tokens in the call that ends a prompt; it computes logits for each."""


def sequential_log_probs(
    model: nn.Module,
    text: list[int],
    start: int,
    rows: int,
    packing: Packing | None = None,
    *,
    shaken: bool = False,
) -> mx.array:
    """Return log-probabilities [P, V] after each token of `text` from `start` - 1 on.

    With one row, the calls are those of mlx-lm's loop: the prompt, which ends before `start`,
    without its last token, then one token at a time. With several, they are like those of our loop:
    the whole prompt, then `rows` tokens at a time. The difference is the noise of the arithmetic:
    kernels for one query row and for several round differently.

    packing: of the keys and values in the cache
    shaken:  as in `plain_caches`
    """
    cache = plain_caches(model, packing, shaken=shaken)

    def call(begin: int, end: int) -> mx.array:
        logits: mx.array = model(mx.array([text[begin:end]]), cache=cache)
        return logits

    read = start - 1 if rows == 1 else max(0, start - LAST)
    for at in range(0, read, CHUNK):
        call(at, min(at + CHUNK, read))
        mx.eval([layer.state for layer in cache])
    found = []
    if rows > 1:
        found.append(log_softmax(call(read, start)[0, -1:]))
        mx.eval(found)
    for at in range(start - 1 + len(found), len(text), rows):
        found.append(log_softmax(call(at, at + rows)[0]))
        mx.eval(found[-1])
    return mx.concatenate(found, axis=0)
