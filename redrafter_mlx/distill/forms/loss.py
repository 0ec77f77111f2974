"""The distillation loss: drafts against the tokens and the probabilities of the target.

Paper, section 3.5: at each position of a text the drafter drafts the next T tokens. The loss is the
cross-entropy of each draft against the target's token (hard labels). Here the target's
probabilities (soft labels), computed from the hidden states in the corpus, are used as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import mlx.core as mx

from redrafter_mlx.distill.corpus.examples import Batch
from redrafter_mlx.distill.forms.eagle_sequences import Sequences


def distillation_loss(
    draft_logits: Iterable[mx.array],
    batch: Batch | Sequences,
    outputs: mx.array,
    teacher: mx.array | None,
    depth_weights: Sequence[float],
    soft_share: float,
) -> mx.array:
    """Return the mean cross-entropy of a position, weighted over depths.

    It is taken against the target's token, and with the share `soft_share` against the target's
    probabilities (which differs from the Kullback-Leibler divergence by a constant). Texts without
    hard labels use the probabilities alone.

    Shapes:
      draft_logits: [P, V'] float32, for each depth
      outputs: [V] int32, see `DraftVocabulary.index`
      teacher: [P + T, V'], the target's probabilities of the tokens that can be drafted; required
               if `soft_share` is above 0
    """
    total = mx.zeros(())
    P = batch.labels.shape[0]
    for depth, logits in enumerate(draft_logits):
        normaliser, _ = cast(tuple[mx.array, mx.array], _normalised(logits))
        label = outputs[batch.labels[:, depth]]
        valid = batch.valid[:, depth]
        at_label = mx.take_along_axis(logits, mx.maximum(label, 0)[:, None], axis=1)[:, 0]
        hard = mx.where(valid & batch.hard & (label >= 0), 1 - soft_share, 0.0)
        summed, weight = mx.sum(hard * (normaliser - at_label)), mx.sum(hard)
        if soft_share > 0:
            assert teacher is not None
            expected = mx.sum(teacher[depth + 1 : depth + 1 + P] * logits, axis=1)
            soft = mx.where(valid, mx.where(batch.hard, soft_share, 1.0), 0.0)
            summed, weight = summed + mx.sum(soft * (normaliser - expected)), weight + mx.sum(soft)
        total = total + depth_weights[depth] * summed / mx.maximum(weight, 1.0)
    return total / sum(depth_weights)


def _log_sum_exp(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Return log sum exp over the last axis, with only one exponential per logit, and the softmax.

    The gradient reuses the softmax. Over a vocabulary, exponentials are most of the cost of a loss
    on a CPU.
    """
    softmax = mx.softmax(logits, axis=-1)
    return mx.max(logits, axis=-1) - mx.log(mx.max(softmax, axis=-1)), softmax


def _gradient(
    _: mx.array, cotangents: tuple[mx.array, mx.array], results: tuple[mx.array, mx.array]
) -> mx.array:
    return results[1] * cotangents[0][..., None]


_normalised = mx.custom_function(_log_sum_exp)
_normalised.vjp(_gradient)
