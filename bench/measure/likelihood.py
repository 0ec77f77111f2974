"""Likelihood of a text under the target: a proxy for its quality that needs no judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.speculation.sampling import log_softmax


@dataclass(frozen=True)
class Likelihood:
    """Likelihood of one text, at temperature 1."""

    tokens: int  # number of tokens in the means
    log_likelihood: float  # mean log probability of a token, nats
    entropy: float  # mean entropy of the target's distribution before each token, nats


def likelihood(
    redrafter: Redrafter, prompt: Sequence[int], tokens: Sequence[int]
) -> Likelihood | None:
    """Score `tokens` after `prompt` in one call of the target; None if there are no tokens."""
    if not tokens:
        return None
    text = mx.array([[*prompt, *tokens]])
    with redrafter.target.lock:
        logits = redrafter.model(text[:, :-1])[0, len(prompt) - 1 :]
        log_probs = log_softmax(logits.astype(mx.float32))
        chosen = mx.take_along_axis(log_probs, text[0, len(prompt) :, None], axis=1)
        probs = mx.exp(log_probs)
        surprise = mx.where(probs > 0, -probs * log_probs, 0.0)
        found = np.array(mx.stack([mx.mean(chosen), mx.mean(mx.sum(surprise, axis=1))]))
    return Likelihood(len(tokens), float(found[0]), float(found[1]))
