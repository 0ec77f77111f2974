"""The weights that training starts from, scaled to a target and a corpus."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from redrafter_mlx.drafting.files.drafter_files import parameters_of
from redrafter_mlx.drafting.recurrent import RecurrentNetwork
from redrafter_mlx.target_model.model import Target

SPREAD = 2.0
"""Root mean square of a fresh drafter's logits after a norm. The factors of a norm grow slowly, by
at most the learning rate per step. If they start far below their final values, they slow everything
down."""


def draw_matrices(network: nn.Module, seed: int, size: Callable[[tuple[int, ...]], float]) -> None:
    """Draw all matrices of a network from a normal distribution, of a `size` for each shape."""
    matrices = sorted((n, a.shape) for n, a in parameters_of(network).items() if a.ndim > 1)
    keys = mx.random.split(mx.random.key(seed), len(matrices))
    for (name, shape), key in zip(matrices, keys, strict=True):
        drawn = size(shape) * mx.random.normal(shape, key=key)
        network.update(tree_unflatten([(name, drawn)]))


def scale_recurrent(
    network: RecurrentNetwork, context_rms: mx.array, embedding_rms: float, logit_rms: float
) -> None:
    """Scale a fresh recurrent head's inputs to unit size, and a tied head's logits.

    A target's hidden states have a few coordinates far larger than the rest, and its embeddings are
    small. Without scaling, those coordinates would drown everything else. In the paper's form the
    scale is part of the weights. The inputs of context layers are far more uneven, so they have a
    separate scale: every optimiser step would be large compared with a weight of a thousandth.

    The three are of the functions of these names.
    """
    config, D = network.config, network.config.hidden_size
    unit = 1 / mx.maximum(context_rms, 1e-4)  # which float16 holds, as it is saved
    if config.context_layers:
        # Start with the last state alone, which is sure to help, and without the layers' inputs.
        network.context_scale, unit = unit, mx.ones((D,))
        network.context_proj.weight = last_part(config.context_size, D)
        network.context_proj.bias = mx.zeros((D,))
    tied = config.head == "tied"
    readers: list[nn.Module]
    if config.exit_dim != 2 * D:
        readers = [network.input_proj]
    else:
        readers = [block.linear for block in network.lm_head[: config.num_draft_layers]]
        readers.append(network.output_proj if tied else network.lm_head[-1])
    for layer in readers:
        layer.weight = layer.weight * mx.concatenate([unit, mx.ones((D,))])
    if config.rnn:
        network.rnn_w.weight = network.rnn_w.weight / embedding_rms
    if tied:
        network.output_norm.weight = mx.full((D,), SPREAD / logit_rms)


def last_part(size: int, part: int) -> mx.array:
    """Return the matrix [part, size] that maps a vector to its last `part` coordinates."""
    return mx.concatenate([mx.zeros((part, size - part)), mx.eye(part)], axis=1)


def context_rms(states: np.ndarray, *, normed: bool = False) -> mx.array:
    """Return the root mean square [C] of states [M, C], `normed` to unit size first."""
    squares = mx.square(mx.array(states).astype(mx.float32))
    if normed:
        squares = squares / mx.mean(squares, axis=1, keepdims=True)
    return mx.sqrt(mx.mean(squares, axis=0))


def embedding_rms(target: Target, counts: np.ndarray) -> float:
    """Return the root mean square of the embeddings of the tokens with a count [V] above 0."""
    embedded = target.embedding(mx.array(np.flatnonzero(counts))).astype(mx.float32)
    return float(mx.sqrt(mx.mean(mx.square(embedded))))


def logit_rms(target: Target, tokens: mx.array | None) -> float:
    """Return the root mean square of the logits of `tokens` for random inputs of unit size."""
    drawn = mx.random.normal((64, target.hidden_size), key=mx.random.key(0)).astype(target.dtype)
    logits = target.output_rows(tokens)(drawn).astype(mx.float32)
    return float(mx.sqrt(mx.mean(mx.square(logits))))


def output_matrix(target: Target, tokens: mx.array | None) -> mx.array:
    """Return the target's output layer, dequantised, scaled, without bias or caps: [V', D]."""
    logits, D = target.logits_of(tokens), target.hidden_size
    unit, nothing = mx.eye(D, dtype=target.dtype), mx.zeros((1, D), target.dtype)
    return (logits(unit[None]) - logits(nothing[None]))[0].T
