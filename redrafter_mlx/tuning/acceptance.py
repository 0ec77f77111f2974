"""Acceptance statistics: how likely drafts are to be accepted, learned from the steps taken.

A verified tree holds the trees of all smaller shapes, or nearly: a search with fewer beams
continues from fewer prefixes, and now and then keeps one that more beams drop. A node's `beam` is
the smallest beam width that contains it, minus one:

    root -+- is -+- a -+- red     beam 0, beam 1     W = 1, L = 3 would have had   is, a
          |      |     `- small   beam 1             W = 1, L = 4                  is, a, red
          |      `- dark          beam 1             W = 2, L = 3                  is, red, a, dark
          `- red                  beam 1

So one step is evidence about every width and depth that its tree reaches. Without recent evidence,
a depth is as good as the one before it, and a further beam catches a share of what was missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.untrained.continuation import Kind
from redrafter_mlx.response import StepResult
from redrafter_mlx.tuning.cost import Array

_DECAY = 0.92
"""Share of older evidence that is left after a step: half of it after 8 steps
(test_a_text_that_changes_is_followed_within_32_steps)."""

_PRIOR = 2.0
"""Weight, in steps, of a guess from a neighbouring depth or width
(test_drafting_begins_again_when_it_pays_again)."""

_FIRST_CHANCE = 0.6
"""Assumed acceptance rate of an unknown drafter's first draft; such drafters are worth a try
(test_drafting_begins_again_when_it_pays_again)."""

_RESCUE = 0.35
"""Share of the misses that one more beam is assumed to catch, times the narrower beams' own
acceptance rate: a drafter whose first guesses are worthless has no better second ones
(test_a_drafter_whose_levels_are_dear_drafts_few)."""


class Trust:
    """How far continuations of each kind are accepted, as a share of what was expected of them."""

    def __init__(self) -> None:
        # By kind, with the last ones weighing most: expected and accepted continuations.
        self._counts: dict[Kind, tuple[float, float]] = dict.fromkeys(get_args(Kind), (1.0, 1.0))

    def learn(self, kind: Kind, expected: float, accepted: float) -> None:
        """Record one continuation: the expected and the actual share of its drafts accepted."""
        counts = self._counts[kind]
        self._counts[kind] = _DECAY * counts[0] + expected, _DECAY * counts[1] + accepted

    def of(self, kind: Kind) -> float:
        """Return the share, at most 1."""
        expected, accepted = self._counts[kind]
        return min(accepted / expected, 1.0)

    def begin_answer(self) -> None:
        """Halve the evidence, for another text: kinds that are no longer tried come back."""
        for kind, (expected, accepted) in self._counts.items():
            self._counts[kind] = 1 + expected / 2, 1 + accepted / 2

    def to_record(self) -> dict[str, object]:
        """Return a record for a file; `from_record` is the inverse."""
        return {str(kind): counts for kind, counts in self._counts.items()}

    @classmethod
    def from_record(cls, record: Mapping[str, Sequence[float]]) -> Trust:
        """Read a record that `to_record` wrote."""
        known = cls()
        for kind in known._counts:
            expected, accepted = record.get(kind, known._counts[kind])
            known._counts[kind] = expected, accepted
        return known


class AcceptanceStatistics:
    """Acceptance rates by width and depth, and what they let expect of some shapes.

    shapes: the shapes to estimate, in the order of all arrays [S]
    trust:  how far continuations of the host are accepted
    biased: the same for rows with a grammar or penalties, which change the target; None before the
            first, and not in records
    """

    def __init__(self, shapes: Iterable[BeamShape]) -> None:
        self.shapes = tuple([shape for shape in shapes if shape.length > 1])
        self.trust = Trust()
        self.biased: AcceptanceStatistics | None = None
        self._sizes = sizes(self.shapes)
        W, L, _ = self._sizes.max(axis=(1, 2), initial=2)
        self._width, self._depth = np.arange(W)[:, None], np.arange(1, L)
        # [3, W, D], of depth d + 1 with w + 1 beams: hits; trials, in steps where depth d was
        # accepted; and all steps whose tree reached it.
        self._counts: Array = np.zeros((3, W, L - 1))
        self._counts[:2, 0, 0] = _PRIOR * _FIRST_CHANCE, _PRIOR
        self._missed = 0  # last steps in which no draft was accepted

    def learn(self, *rows: StepResult) -> None:
        """Record one drafted step, with the result of each batch row."""
        self._missed = self._missed + 1 if max([len(step.path) for step in rows]) == 1 else 0
        self._counts *= _DECAY ** max(1, min(self._missed - 2, 4))
        for step in rows:
            beams, depths = np.array(step.beams), np.array(step.depths)
            deepest = ((beams == self._width) * depths).max(axis=1, keepdims=True)  # [W, 1]
            reached = (beams[step.path] <= self._width).sum(axis=1, keepdims=True) - 1
            covered = self._depth <= np.minimum.accumulate(deepest)  # [W, D]
            tried = covered & (self._depth <= reached + 1)
            self._counts += tried & (self._depth <= reached), tried, covered

    def of(self, *, biased: bool) -> AcceptanceStatistics:
        """Return the statistics of one kind of rows; both begin with the same evidence."""
        if biased and self.biased is None:
            self.biased = deepcopy(self)
        return self.biased if biased and self.biased else self

    def begin_answer(self) -> None:
        """Give continuations that were given up another chance, for the text of a new answer."""
        self.trust.begin_answer()
        if self.biased is not None:
            self.biased.begin_answer()

    def chances(self) -> Array:
        """Return [W, D], the chance that depth d + 1 is accepted if d was, with w + 1 beams."""
        rows: list[list[float]] = []
        for all_hits, all_trials in zip(*self._counts[:2].tolist(), strict=True):
            row: list[float] = []
            for d, (hits, trials) in enumerate(zip(all_hits, all_trials, strict=True)):
                if rows:
                    narrower = rows[-1][d]
                    guess = narrower + (1 - narrower) * narrower * _RESCUE
                else:
                    guess = row[-1] if row else hits / trials
                row.append((hits + _PRIOR * guess) / (trials + _PRIOR))
            rows.append(row)
        return np.array(rows)

    def tokens(self) -> Array:
        """Return [S], the expected tokens of a step of each shape, the bonus token included."""
        return 1 + expected_drafts(self.chances(), self._sizes)

    def steps(self) -> Array:
        """Return [S], the number of steps with evidence about each shape; older ones weigh less."""
        width, length, _ = self._sizes[:, :, 0]
        steps: Array = self._counts[2, width - 1, length - 2]
        return steps

    def accepted_by_depth(self, shape: BeamShape) -> list[float]:
        """Return the chance that a draft of each depth is accepted, for a shape that is not cut."""
        of_width: list[float] = _reached(self.chances())[shape.width - 1].tolist()
        return of_width[: shape.length - 1]

    def continued(self, shapes: Iterable[BeamShape]) -> AcceptanceStatistics:
        """Return statistics of other shapes that begin with this evidence, and share the trust."""
        other = AcceptanceStatistics(shapes)
        _, W, D = np.minimum(self._counts.shape, other._counts.shape)
        other._counts[:, :W, :D] = self._counts[:, :W, :D]
        other.trust, other._missed = self.trust, self._missed
        other.biased = self.biased and self.biased.continued(shapes)
        return other

    def to_record(self) -> dict[str, object]:
        """Return a record for a file; `from_record` is the inverse."""
        return {"counts": self._counts.tolist(), "trust": self.trust.to_record()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> AcceptanceStatistics:
        """Read a record that `to_record` wrote."""
        counts = np.array(record["counts"], float)
        known = cls([BeamShape(counts.shape[1], counts.shape[2] + 1)])
        known._counts, known.trust = counts, Trust.from_record(record["trust"])
        return known


def sizes(shapes: Sequence[BeamShape]) -> NDArray[np.int64]:
    """Return [3, S, 1]: width, length and nodes of each shape."""
    each = [(s.width, s.length, s.nodes) for s in shapes]
    return np.array(each, np.int64).reshape(-1, 3).T[:, :, None]


def expected_drafts(chances: Array, shapes: NDArray[np.int64]) -> Array:
    """Return the expected accepted drafts of shapes: a sum over their likeliest nodes but the root.

    Shapes:
      chances: [W, D], the chance that depth d + 1 is accepted if d was, with w + 1 beams
      shapes:  [3, S, 1], see `sizes`
    Returns:
      [S]
    """
    values = _reached(chances)
    values[1:] -= values[:-1].copy()  # beam w adds what w + 1 beams reach and w beams do not
    order = values.ravel().argsort()[::-1]
    beam, depth = order // values.shape[1], order % values.shape[1]
    width, length, nodes = shapes
    inside = (beam < width) & (depth < length - 1)  # [S, W * D]
    chosen = inside & (inside.cumsum(axis=1) < nodes)
    drafts: Array = chosen @ values.ravel()[order]
    return drafts


def _reached(chances: Array) -> Array:
    """Return [W, D], the chance that depth d + 1 is accepted with w + 1 beams."""
    reached: Array = np.maximum.accumulate(chances.cumprod(axis=1), axis=0)
    return reached
