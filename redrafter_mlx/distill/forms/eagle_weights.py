"""The EAGLE network that training starts from, scaled to a corpus."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.forms.medusa import output_matrix
from redrafter_mlx.distill.forms.recurrent_weights import SPREAD, logit_rms
from redrafter_mlx.drafting.drafter_files import parameters_of
from redrafter_mlx.drafting.published.eagle_config import EagleConfig
from redrafter_mlx.drafting.published.eagle_network import EagleThreeNetwork
from redrafter_mlx.target.model import Target


def fresh_network(
    config: EagleConfig, target: Target, tokens: mx.array | None, texts: Sequence[Text], seed: int
) -> EagleThreeNetwork:
    """Return an untrained network.

    Its context starts as the last of the layers that it reads, each coordinate scaled to unit size:
    a target's hidden states have a few coordinates far larger than the rest, which would drown the
    others. Its output layer starts as the target's.

    tokens: [V'], the tokens that it can draft; None is the whole vocabulary
    texts:  some texts of the corpus
    seed:   seed of its weights
    """
    network = EagleThreeNetwork(config)
    matrices = {n: a.shape for n, a in parameters_of(network).items() if a.ndim == 2}
    keys = mx.random.split(mx.random.key(seed), len(matrices))
    drawn = [
        (name, mx.random.normal(shape, key=key) * shape[1] ** -0.5)
        for (name, shape), key in zip(sorted(matrices.items()), keys, strict=True)
    ]
    network.update(tree_unflatten(drawn))
    D, others = config.hidden_size, config.context_size - config.hidden_size
    network.fc.weight = mx.concatenate([mx.zeros((D, others)), mx.eye(D)], axis=1)
    inputs = np.concatenate([text.whole_states for text in texts])[:, : config.context_size]
    for norm, part in zip(
        network.fc_norm, np.split(inputs, len(config.layers), axis=1), strict=True
    ):
        norm.weight = 1 / mx.maximum(_normed_size(part), 1e-6)
    network.lm_head.weight = output_matrix(target, tokens)
    network.norm.weight = mx.full((D,), SPREAD / logit_rms(target, tokens))
    return network


def _normed_size(states: np.ndarray) -> mx.array:
    """Return the root mean square [D] of each coordinate of states [M, D], each state normed."""
    squares = mx.square(mx.array(states).astype(mx.float32))
    return mx.sqrt(mx.mean(squares / mx.mean(squares, axis=1, keepdims=True), axis=0))
