"""A model whose next token depends only on its last one, so that a drafter can know the text.

Heads that predict the right token at the wrong distance are never accepted, for any text.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from tiny import random_model

V = 23
STEP = 7
"""The token after t is t + STEP modulo V, so no two of any V consecutive tokens are equal."""


def after(tokens: mx.array, times: int = 1) -> mx.array:
    """Return the token that comes `times` tokens after each of `tokens`."""
    return (tokens + times * STEP) % V


def chained_model() -> nn.Module:
    """Return a model whose layers add nothing: a hidden state is its token's scaled unit vector."""
    model = random_model("llama (mistral-style)", vocab_size=V)
    D = model.args.hidden_size
    model.model.embed_tokens.weight = mx.eye(V, D)
    for layer in model.layers:
        layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
        layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)
    model.lm_head.weight = predicting(1, D)
    return model


def predicting(times: int, size: int) -> mx.array:
    """Return an output matrix [V, size] that predicts the token `times` after a unit vector's."""
    return 10 * mx.eye(V)[after(mx.arange(V), -times)] @ mx.eye(V, size)
