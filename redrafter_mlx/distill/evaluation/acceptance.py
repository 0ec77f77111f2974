"""How good a drafter is on held-out texts, without decoding them again.

The target's greedy text is known, and with it the drafts it would accept: the longest that agree
with the text. Walking the text in such steps gives the very tokens/step of decoding it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.examples import Batch, Positions
from redrafter_mlx.distill.evaluation.draft_logits import draft_logits, levels_along
from redrafter_mlx.drafting.level_drafter import LevelDrafter
from redrafter_mlx.speculation.beam_search import beam_search

_POSITIONS = 512
"""In one call of the drafter, which bounds memory."""


@dataclass(frozen=True)
class DraftQuality:
    """A drafter's quality on held-out texts.

    top1, top5:      by depth: how often the target's token is the likeliest, or among five
    tokens_per_step: simulated, by beam width
    accepted:        by beam width: share of steps in which drafts 1, 2, ... were accepted
    """

    top1: tuple[float, ...]
    top5: tuple[float, ...]
    tokens_per_step: Mapping[int, float]
    accepted: Mapping[int, tuple[float, ...]]


def measure_quality(
    drafter: LevelDrafter, held_out: Positions, shapes: Sequence[BeamShape]
) -> DraftQuality:
    """Quality on `held_out`; tokens outside the draft vocabulary count as wrong."""
    outputs = drafter.vocabulary.index()
    starts = range(0, len(held_out), _POSITIONS)
    hits = [_hits(drafter, held_out.batch(at, _POSITIONS), outputs) for at in starts]
    right = np.sum([h[0] for h in hits], axis=0)  # [2, T]
    asked = np.maximum(np.sum([h[1] for h in hits], axis=0), 1)
    per_step: dict[int, float] = {}
    accepted: dict[int, tuple[float, ...]] = {}
    for shape in shapes:
        steps = simulate_steps(accepted_lengths(drafter, held_out, shape), held_out.text)
        per_step[shape.width] = float((steps + 1).mean()) if len(steps) else 1.0
        accepted[shape.width] = tuple(
            float((steps >= n).mean()) if len(steps) else 0.0 for n in range(1, shape.length)
        )
    top1, top5 = (tuple(float(x) for x in row / asked) for row in right)
    return DraftQuality(top1, top5, per_step, accepted)


def accepted_lengths(drafter: LevelDrafter, held_out: Positions, shape: BeamShape) -> np.ndarray:
    """[M] int: how many drafts the target would accept at each position."""
    found = []
    for at in range(0, len(held_out), _POSITIONS):
        batch = held_out.batch(at, _POSITIONS)
        levels = levels_along(drafter, batch, shape.length - 1)
        beams = beam_search(levels, batch.roots, shape)
        P, W, L = beams.tokens.shape
        right = mx.ones((P, W), mx.bool_)  # prefixes that agree with the text
        run = mx.zeros((P,), mx.int32)
        for level in range(1, L):
            origin = beams.parent_indices[:, :, level]
            same = beams.tokens[:, :, level] == batch.labels[:, level - 1, None]
            same = same & batch.valid[:, level - 1, None]
            right = same & mx.take_along_axis(right, origin, axis=1)
            run = run + mx.any(right, axis=1)
        found.append(np.array(run))
    return np.concatenate(found)[: len(held_out)]


def simulate_steps(accepted: np.ndarray, text: np.ndarray) -> np.ndarray:
    """The drafts accepted in each step, decoding each text from its first token.

    A step at position i emits its accepted drafts and one more token, from which the next starts.
    Its last step, which would go beyond the text, is left out.

    Shapes:
      accepted, text: [M]
    """
    steps = []
    at, end = 0, len(accepted)
    while at < end:
        following = at + int(accepted[at]) + 1
        if following < end and text[following] == text[at]:
            steps.append(int(accepted[at]))
            at = following
        else:
            at = int(np.searchsorted(text, text[at], side="right"))
    return np.array(steps, np.int64)


def _hits(drafter: LevelDrafter, batch: Batch, outputs: mx.array) -> tuple[np.ndarray, np.ndarray]:
    """[2, T] how often the label was first, or in the first five; [T] how often there was one."""
    first, five = [], []
    levels = levels_along(drafter, batch, batch.labels.shape[1])
    for depth, logits in enumerate(draft_logits(levels, batch.labels)):
        label = outputs[batch.labels[:, depth]]
        known = batch.valid[:, depth] & (label >= 0)
        own = mx.take_along_axis(logits, mx.maximum(label, 0)[:, None], axis=1)
        known = known & mx.logical_not(mx.isnan(own[:, 0]))
        better = mx.sum(logits > own, axis=1)
        first.append(mx.sum(known & (better == 0)))
        five.append(mx.sum(known & (better < 5)))
    hits = mx.stack([mx.stack(first), mx.stack(five)])
    return np.array(hits), np.array(mx.sum(batch.valid, axis=0))
