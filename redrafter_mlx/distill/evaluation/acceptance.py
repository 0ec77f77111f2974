"""A drafter's acceptance on held-out texts, simulated without decoding them again.

The target's greedy text is known, and with it the drafts that it would accept: the longest
candidate prefix that agrees with the text. Stepping through the text by these lengths gives exactly
the tokens/step of decoding it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.examples import Batch, lay_out
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.drafting.interface import Memory, Seen
from redrafter_mlx.drafting.level_drafter import DraftLevels, LevelDrafter
from redrafter_mlx.speculation.beam_search import beam_search

_POSITIONS = 512
"""Maximum number of positions in one call of the drafter, which bounds its use of memory."""

_POSITIONS_WITH_MEMORY = 32
"""The same if each position comes with a copy of the drafter's memory of the text."""


@dataclass(frozen=True)
class DraftQuality:
    """A drafter's quality on held-out texts."""

    # top1, top5: by depth: how often the target's token is the likeliest draft, or among the five
    # likeliest
    top1: tuple[float, ...]
    top5: tuple[float, ...]
    tokens_per_step: Mapping[int, float]  # simulated, by beam width
    # by beam width: share of steps in which drafts 1, 2, ... were accepted
    accepted: Mapping[int, tuple[float, ...]]


@dataclass(frozen=True)
class DraftsAlong:
    """A drafter's drafts after each of the M answer tokens of texts.

    Shapes:
      right:    [2, T], by depth: how often the target's token was the likeliest draft, or among
                the five likeliest
      asked:    [T], how many tokens there were
      accepted: [M] for each beam shape, how many drafts the target would accept
      text:     [M], index of the token's text
    """

    right: np.ndarray
    asked: np.ndarray
    accepted: Mapping[BeamShape, np.ndarray]
    text: np.ndarray

    def quality(self) -> DraftQuality:
        per_step: dict[int, float] = {}
        accepted: dict[int, tuple[float, ...]] = {}
        for shape, own in self.accepted.items():
            steps = simulate_steps(own, self.text)
            per_step[shape.width] = float((steps + 1).mean()) if len(steps) else 1.0
            accepted[shape.width] = tuple(
                float((steps >= n).mean()) if len(steps) else 0.0 for n in range(1, shape.length)
            )
        top1, top5 = (tuple(float(x) for x in row / self.asked) for row in self.right)
        return DraftQuality(top1, top5, per_step, accepted)

    def on(self, texts: Sequence[int]) -> Mapping[int, float]:
        """Return tokens/step on some of the texts, by beam width."""
        some = np.isin(self.text, texts)
        own = {shape: accepted[some] for shape, accepted in self.accepted.items()}
        return replace(self, accepted=own, text=self.text[some]).quality().tokens_per_step


def measure_quality(
    drafter: LevelDrafter, texts: Sequence[Text], drafts: int, shapes: Sequence[BeamShape]
) -> DraftQuality:
    """Measure the quality along the answers of `texts`, as `draft_along` does."""
    return draft_along(drafter, texts, drafts, shapes).quality()


def draft_along(
    drafter: LevelDrafter, texts: Sequence[Text], drafts: int, shapes: Sequence[BeamShape]
) -> DraftsAlong:
    """Draft along the answers of `texts`, by depth up to `drafts` and by shape.

    Both are limited to the length that the drafter can draft. Tokens outside the draft vocabulary
    are treated as wrong.
    """
    outputs = drafter.vocabulary.index()
    drafts = drafter.drafted(BeamShape(1, drafts + 1)).length - 1
    shapes = [drafter.drafted(shape) for shape in shapes]
    hits, lengths = [], []
    for roots in roots_along(drafter, texts, drafts):
        hits.append(_hits(roots, outputs))
        lengths.append([accepted_lengths(roots, shape) for shape in shapes])
    right = np.sum([h[0] for h in hits], axis=0)  # [2, T]
    asked = np.maximum(np.sum([h[1] for h in hits], axis=0), 1)
    text = np.repeat(np.arange(len(texts)), [len(text.answer) for text in texts])
    accepted = [np.concatenate(own) for own in zip(*lengths, strict=True)]
    return DraftsAlong(right, asked, dict(zip(shapes, accepted, strict=True)), text)


@dataclass(frozen=True)
class Roots:
    """Some roots and the labels after them, and the drafter's input there."""

    drafter: LevelDrafter
    batch: Batch
    memory: Memory
    seen: Seen

    def levels(self, drafts: int) -> DraftLevels:
        """Return the draft levels after the roots, of which the first `drafts` will be used."""
        return self.drafter.levels(self.memory, self.seen, drafts)


def roots_along(
    drafter: LevelDrafter, texts: Sequence[Text], drafts: int, dtype: mx.Dtype = mx.float32
) -> Iterator[Roots]:
    """Yield every answer token of texts in turn as a root, with the `drafts` labels after it.

    The drafter gets states of this dtype; one with memory needs those of the prompts as well.
    """
    drafter, laid = drafter.uncompiled(), lay_out(texts, drafts)
    every = drafter.features.every_position
    parts = [len(text.answer) for text in texts] if every else [len(laid)]
    at = 0
    for part, size in enumerate(parts):
        memory = _memory_of(drafter, texts[part], dtype) if every else ()
        end, max_roots = at + size, _POSITIONS_WITH_MEMORY if every else _POSITIONS
        while at < end:
            n = min(max_roots, end - at)
            batch, root_at = laid.batch(at, n), laid.root_at[at : at + n]
            states = batch.states[:n, None].astype(dtype)
            once = mx.ones((n,), mx.int32)
            tokens = mx.stack([mx.zeros_like(batch.roots), batch.roots], axis=1)
            seen = Seen(tokens, states, mx.array(root_at - 1), once, int(root_at.max()))
            copied = tree_map(lambda array, n=n: mx.repeat(array, n, axis=0), memory)
            yield Roots(drafter, batch, copied, seen)
            at += n


def _memory_of(drafter: LevelDrafter, text: Text, dtype: mx.Dtype) -> Memory:
    tokens = mx.array([[*text.prompt, *text.answer.tolist()]])
    states = mx.array(text.whole_states[None]).astype(dtype) if drafter.features.any else None
    count = tokens.shape[1] - 1
    zero = mx.zeros((1,), mx.int32)
    return drafter.extend(
        drafter.empty(1), Seen(tokens, states, zero, zero + count, count, start=0)
    )


def draft_logits(levels: DraftLevels, labels: mx.array) -> Iterator[mx.array]:
    """Yield logits [P, V'] float32, depth by depth; each draft is fed with the labels [P, T]."""
    parents = mx.zeros((labels.shape[0], 1), mx.int32)
    yield levels.first()[:, 0]
    for depth in range(1, labels.shape[1]):
        yield levels.following(parents, labels[:, depth - 1 : depth])[:, 0]


def accepted_lengths(roots: Roots, shape: BeamShape) -> np.ndarray:
    """Return [P] int: how many drafts the target would accept after each root."""
    batch = roots.batch
    beams = beam_search(roots.levels(shape.length - 1), batch.roots, shape)
    P, W, L = beams.tokens.shape
    right = mx.ones((P, W), mx.bool_)  # prefixes that agree with the text
    run = mx.zeros((P,), mx.int32)
    for level in range(1, L):
        origin = beams.parent_indices[:, :, level]
        same = beams.tokens[:, :, level] == batch.labels[:, level - 1, None]
        same = same & batch.valid[:, level - 1, None]
        right = same & mx.take_along_axis(right, origin, axis=1)
        run = run + mx.any(right, axis=1)
    return np.array(run)


def simulate_steps(accepted: np.ndarray, text: np.ndarray) -> np.ndarray:
    """Return the number of drafts accepted in each step, decoding each text from its first token.

    A step at position i emits its accepted drafts and one more token, at which the next step
    starts. A text's last step, which would go beyond it, is left out. Shapes: accepted, text [M]
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


def _hits(roots: Roots, outputs: mx.array) -> tuple[np.ndarray, np.ndarray]:
    """Return [2, T], how often the label was first or in the first five; [T], how many labels."""
    first, five, batch = [], [], roots.batch
    levels = roots.levels(batch.labels.shape[1])
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
