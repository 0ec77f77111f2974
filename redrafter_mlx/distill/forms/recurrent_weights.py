"""The recurrent head that training starts from, scaled to a corpus."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.corpus.examples import choose_vocabulary, lay_out
from redrafter_mlx.distill.corpus.hidden_states import host_number
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.drafting.recurrent import RecurrentNetwork
from redrafter_mlx.drafting.recurrent_config import DrafterConfig
from redrafter_mlx.target.model import Target

SPREAD = 2.0
"""Root mean square of a fresh tied drafter's logits. The factors of a norm grow slowly, by at most
the learning rate per step. If they start far below their final values, they slow everything down.
"""


def fresh_drafter(
    config: DrafterConfig, target: Target, counts: np.ndarray, texts: Sequence[Text], seed: int
) -> RecurrentNetwork:
    """Return an untrained drafter, with its inputs scaled for a corpus.

    counts: [V], how often each token is a label; the most frequent can be drafted
    texts:  some texts of the corpus
    seed:   seed of its weights
    """
    drafter = RecurrentNetwork.fresh(config, seed)
    if config.draft_vocab_size is not None:
        drafter.draft_vocab = mx.array(choose_vocabulary(counts, config.draft_vocab_size))
    seen = lay_out(texts, 1).states
    tokens = None if config.draft_vocab_size is None else drafter.draft_vocab
    initialise(drafter, context_rms(seen), embedding_rms(target, counts), logit_rms(target, tokens))
    mx.eval(drafter.parameters())
    return drafter


def initialise(
    drafter: RecurrentNetwork, context_rms: mx.array, embedding_rms: float, logit_rms: float
) -> None:
    """Scale a fresh drafter's inputs to unit size, and a tied head's logits.

    A target's hidden states have a few coordinates far larger than the rest, and its embeddings are
    small. Without scaling, those coordinates would drown everything else. In the paper's form the
    scale is part of the weights. The inputs of context layers are far more uneven, so they have a
    separate scale: every optimiser step would be large compared with a weight of a thousandth.

    Args:
      context_rms: [C], root mean square of each coordinate of the hidden states
      embedding_rms: root mean square of the embeddings
      logit_rms: root mean square of a tied output layer's logits for inputs of unit size
    """
    D = drafter.config.hidden_size
    unit = 1 / mx.maximum(context_rms, 1e-6)
    if drafter.config.context_layers:
        # Start with the last state alone, which is sure to help, and without the layers' inputs.
        last = mx.concatenate([mx.zeros((D, unit.size - D)), mx.eye(D)], axis=1)
        drafter.context_scale, unit = unit, mx.ones((D,))
        drafter.context_proj.weight, drafter.context_proj.bias = last, mx.zeros((D,))
    scale = mx.concatenate([unit, mx.ones((D,))])
    if drafter.config.exit_dim != 2 * D:
        drafter.input_proj.weight = drafter.input_proj.weight * scale
    else:
        for block in drafter.lm_head[: drafter.config.num_draft_layers]:
            block.linear.weight = block.linear.weight * scale
        if drafter.config.head == "tied":
            drafter.output_proj.weight = drafter.output_proj.weight * scale
        else:
            drafter.lm_head[-1].weight = drafter.lm_head[-1].weight * scale
    if drafter.config.rnn:
        drafter.rnn_w.weight = drafter.rnn_w.weight / embedding_rms
    if drafter.config.head == "tied":
        drafter.output_norm.weight = mx.full((D,), SPREAD / logit_rms)


def context_rms(states: np.ndarray) -> mx.array:
    """Return the root mean square [C] of hidden states [M, C], coordinate by coordinate."""
    return mx.sqrt(mx.mean(mx.square(mx.array(states).astype(mx.float32)), axis=0))


def embedding_rms(target: Target, counts: np.ndarray) -> float:
    """Return the root mean square of the embeddings of the tokens with a count [V] above 0."""
    embedded = target.embedding(mx.array(np.flatnonzero(counts))).astype(mx.float32)
    return host_number(mx.sqrt(mx.mean(mx.square(embedded))))


def logit_rms(target: Target, tokens: mx.array | None) -> float:
    """Return the root mean square of the logits of `tokens` for random inputs of unit size."""
    drawn = mx.random.normal((64, target.hidden_size), key=mx.random.key(0)).astype(target.dtype)
    logits = target.output_rows(tokens)(drawn).astype(mx.float32)
    return host_number(mx.sqrt(mx.mean(mx.square(logits))))
