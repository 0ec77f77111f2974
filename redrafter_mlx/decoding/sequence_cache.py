"""What is kept of the text: the target's keys and values, and the drafter's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from redrafter_mlx.drafting.interface import Drafter, Memory, Seen
from redrafter_mlx.target.kv_cache import Snapshot, TreeCache

_MOST_JOINED = 512
"""Missed positions that a drafter is given in one call."""


@dataclass(frozen=True)
class SequenceSnapshot:
    """The references of a `SequenceCache` at one moment."""

    target: Snapshot
    memory: Memory
    remembered: mx.array
    missed: tuple[Seen, ...]


class SequenceCache:
    """The cache of a batch of sequences: of the target, and of its drafter if that remembers.

    Shapes:
      remembered: [B] int32, positions from the first on that `memory` holds

    missed: positions after those, which the drafter is given before it drafts again
    """

    def __init__(self, target: TreeCache, memory: Memory, batch: int) -> None:
        self.target = target
        self.memory = memory
        self.remembered = mx.zeros((batch,), mx.int32)
        self.missed: tuple[Seen, ...] = ()

    def snapshot(self) -> SequenceSnapshot:
        """What a step that is only built, not submitted, would have changed.

        Drop it before submitting: a buffer with two references is copied whole when written.
        """
        return SequenceSnapshot(self.target.snapshot(), self.memory, self.remembered, self.missed)

    def restore(self, before: SequenceSnapshot) -> None:
        """Forget a step that was built and not submitted."""
        self.target.restore(before.target)
        self.memory, self.remembered = before.memory, before.remembered
        self.missed = before.missed

    def flush(self) -> None:
        """Make the cache ready to be kept: all that it holds is computed."""
        self.target.flush()
        mx.eval(self.target.buffers, self.of_drafter)

    @property
    def of_drafter(self) -> list[Memory | mx.array]:
        """All arrays that are kept for the drafter, for evaluation."""
        kept: list[Memory | mx.array] = [self.memory, self.remembered]
        for seen in self.missed[-1:]:  # those before it were evaluated when they were the last
            kept += [seen.tokens, seen.position, seen.count]
            kept += [] if seen.features is None else [seen.features]
        return kept

    def reuse(self, tokens: Sequence[int], drafter: Drafter) -> int:
        """How many positions of one text, whose target rows are all here, need not be read again.

        A drafter that remembers the target's features at every position must see those that it
        missed; one that remembers the tokens alone is given them.
        """
        features = drafter.features
        if not features.every_position:
            return len(tokens)
        known = min(cast(int, self.remembered.item()), len(tokens))
        self.memory, self.missed = self.memory or drafter.empty(1), ()
        self.remembered = mx.array([known], mx.int32)  # what came after it is of another text
        if features.any:
            return known
        if known < len(tokens):
            self.missed = (_of_text(tokens, known),)
        return len(tokens)


def joined(missed: Sequence[Seen]) -> list[Seen]:
    """The same positions in fewer pieces: those of single positions follow each other."""
    pieces: list[Seen] = []
    run: list[Seen] = []
    for seen in missed:
        single = seen.tokens.shape[1] == 2
        if run and (not single or len(run) == _MOST_JOINED):
            pieces.append(_one(run))
            run = []
        if single:
            run.append(seen)
        else:
            pieces.append(seen)
    return pieces + ([_one(run)] if run else [])


def _one(run: Sequence[Seen]) -> Seen:
    """Single positions, each after the one before, as one piece."""
    first, last = run[0], run[-1]
    features = None
    if first.features is not None:
        features = mx.concatenate([s.features for s in run if s.features is not None], axis=1)
    tokens = mx.concatenate([*(s.tokens[:, :1] for s in run), last.tokens[:, 1:]], axis=1)
    count = mx.full(first.count.shape, len(run), mx.int32)
    return Seen(tokens, features, first.position, count, last.bound)


def _of_text(tokens: Sequence[int], start: int) -> Seen:
    """The positions of one text from `start` on, whose features nobody reads."""
    count = len(tokens) - start
    return Seen(
        mx.array([[*tokens[start:], 0]], mx.int32),
        None,
        mx.array([start], mx.int32),
        mx.array([count], mx.int32),
        len(tokens),
        start,
    )
