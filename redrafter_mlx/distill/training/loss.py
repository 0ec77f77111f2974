"""What a drafter is taught: to say, position by position, what the target would say there.

Paper, section 3.5: at each place of a text the drafter runs over the next T tokens and pays the
cross-entropy of each against the target's choice. Beside the choices it may learn the target's
probabilities, which the hidden states in the corpus hold whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from redrafter_mlx.drafting.recurrent import BoundDrafter


class Batch(NamedTuple):
    """P places of texts, laid end to end.

    Shapes:
      states: [P + T, C], the target's hidden states that chose the roots; those of the T
              places behind the last are there for their probabilities only
      roots:  [P] int32, the token behind which is drafted
      labels: [P, T] int32, what the target says behind the root
      valid:  [P, T] bool, False behind the end of a text
      own:    [P] bool, False where the labels are not what the target says, but what was asked
    """

    states: mx.array
    roots: mx.array
    labels: mx.array
    valid: mx.array
    own: mx.array


def output_index(bound: BoundDrafter, vocab_size: int) -> mx.array:
    """[V] int32: which output of the drafter each token is, -1 for what it cannot draft."""
    if bound.tokens is None:
        return mx.arange(vocab_size, dtype=mx.int32)
    index = mx.full((vocab_size,), -1, mx.int32)
    index[bound.tokens] = mx.arange(bound.output_size, dtype=mx.int32)
    return index


def draft_logits(bound: BoundDrafter, batch: Batch) -> list[mx.array]:
    """Logits [P, V'] float32 of each of the T positions, fed with the labels before it."""
    P, T = batch.labels.shape
    context = bound.read(batch.states[:P].astype(mx.float32))
    state = bound.advance(mx.zeros_like(context), batch.roots)
    logits = []
    for depth in range(T):
        logits.append(bound.logits(context, state))
        if depth < T - 1:
            state = bound.advance(state, batch.labels[:, depth])
    return logits


def distillation_loss(
    bound: BoundDrafter,
    batch: Batch,
    outputs: mx.array,
    teacher: mx.array | None,
    depth_weights: Sequence[float],
    soft_share: float,
) -> mx.array:
    """The mean cross-entropy of a place, weighted over depths.

    Against the target's choice, and for `soft_share` of it against the target's probabilities
    (which differs from the Kullback-Leibler divergence by a constant). Of what was asked, the
    probabilities alone are learnt.

    Shapes:
      outputs: [V] int32, see `output_index`
      teacher: [P + T, V'] the target's probabilities of what can be drafted; with `soft_share`
               above 0
    """
    total = mx.zeros(())
    P = batch.roots.shape[0]
    for depth, logits in enumerate(draft_logits(bound, batch)):
        normaliser = log_sum_exp(logits)
        label = outputs[batch.labels[:, depth]]
        valid = batch.valid[:, depth]
        at_label = mx.take_along_axis(logits, mx.maximum(label, 0)[:, None], axis=1)[:, 0]
        hard = mx.where(valid & batch.own & (label >= 0), 1 - soft_share, 0.0)
        paid, weight = mx.sum(hard * (normaliser - at_label)), mx.sum(hard)
        if soft_share > 0:
            assert teacher is not None
            expected = mx.sum(teacher[depth + 1 : depth + 1 + P] * logits, axis=1)
            soft = mx.where(valid, mx.where(batch.own, soft_share, 1.0), 0.0)
            paid, weight = paid + mx.sum(soft * (normaliser - expected)), weight + mx.sum(soft)
        total = total + depth_weights[depth] * paid / mx.maximum(weight, 1.0)
    return total / sum(depth_weights)


def log_sum_exp(logits: mx.array) -> mx.array:
    """log sum exp over the last axis, from one exponential of each logit.

    Its gradient is the softmax that it was computed from; over a vocabulary, exponentials are
    most of what a loss costs on a CPU.
    """
    return cast(tuple[mx.array, mx.array], _normalised(logits))[0]


def _normalise(logits: mx.array) -> tuple[mx.array, mx.array]:
    softmax = mx.softmax(logits, axis=-1)
    return mx.max(logits, axis=-1) - mx.log(mx.max(softmax, axis=-1)), softmax


def _gradient(
    _: mx.array, cotangents: tuple[mx.array, mx.array], results: tuple[mx.array, mx.array]
) -> mx.array:
    return results[1] * cotangents[0][..., None]


_normalised = mx.custom_function(_normalise)
_normalised.vjp(_gradient)
