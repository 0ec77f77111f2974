"""What the target thinks along texts that are there already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from redrafter_mlx.decoding.prefix_cache import common_prefix
from redrafter_mlx.distill.corpus.hidden_states import check_finite, to_host
from redrafter_mlx.target.model import Target


def states_along(
    target: Target, texts: Iterable[tuple[Sequence[int], int]]
) -> Iterator[np.ndarray]:
    """For each text and the place of a token in it (1 or later): the states from there on.

    A beginning that a text has in common with the one before it is not read again.

    Returns:
      [tokens - place, C] each, the target's hidden states that choose these tokens
    """
    cache = [KVCache() for _ in range(target.n_layers)]
    before: Sequence[int] = []
    for text, place in texts:
        tokens = text[:-1]  # what the last one leads to is not asked
        start = min(common_prefix(before, tokens), place - 1)
        for layer in cache:
            layer.trim(layer.offset - start)
        hidden = target.hidden(mx.array([tokens[start:]], mx.int32), cache)[0, place - 1 - start :]
        mx.eval(hidden, [layer.state for layer in cache])
        before = tokens
        yield check_finite(to_host(hidden), target)
