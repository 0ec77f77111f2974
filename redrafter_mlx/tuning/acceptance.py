"""Acceptance statistics: how likely drafts are to be accepted, learned from the steps taken.

A verified tree holds the trees of all smaller shapes, or nearly: a search with fewer beams
continues from fewer prefixes, and now and then keeps one that more beams drop. A node's `beam` is
the smallest beam width that contains it, minus one. Nodes are sorted by likelihood. So a shape of
width w, length l and n nodes would have had the first n nodes whose beam is below w and whose depth
is below l:

    root -+- is -+- a -+- red     beam 0, beam 1     W = 1, L = 3 would have had   is, a
          |      |     `- small   beam 1             W = 1, L = 4                  is, a, red
          |      `- dark          beam 1             W = 2, L = 3                  is, red, a, dark
          `- red                  beam 1

So one step shows how many accepted drafts each smaller shape would have had. For larger shapes the
acceptance rates by width and depth are extrapolated: a depth without recent evidence is as good as
the depth before it, and a further beam catches a share of what the narrower ones missed. Evidence
decays exponentially, so these guesses return, and are probed when they promise enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.continuation import Kind
from redrafter_mlx.response import StepResult

Array = NDArray[np.float64]

_DECAY = 0.94
"""Share of older evidence that is left after a step: half of it after 11 steps."""

_PRIOR = 2.0
"""Weight, in steps, of a guess from a neighbouring depth or width."""

_FIRST_CHANCE = 0.6
"""Assumed acceptance rate of an unknown drafter's first draft; such drafters are worth a try."""

_RESCUE = 0.35
"""Share of the misses that one more beam is assumed to catch, times the narrower beams' own
acceptance rate: a drafter whose first guesses are worthless has no better second ones."""


class Trust:
    """How far continuations of each kind are accepted, as a share of what was expected of them."""

    def __init__(self) -> None:
        # By kind, with the last ones weighing most: expected and accepted continuations.
        self._counts: dict[Kind, tuple[float, float]] = dict.fromkeys(get_args(Kind), (1.0, 1.0))

    def learn(self, kind: Kind, expected: float, accepted: float) -> None:
        """Record a continuation: the expected and the actual share of its drafts accepted.

        They count alike, however long they are: drafts after a wrong one tell nothing more.
        """
        counts = self._counts[kind]
        self._counts[kind] = _DECAY * counts[0] + expected, _DECAY * counts[1] + accepted

    def of(self, kind: Kind) -> float:
        """Return the share, at most 1."""
        expected, accepted = self._counts[kind]
        return min(accepted / expected, 1.0)

    def begin_answer(self) -> None:
        """Halve the evidence, for another text, so that full trust returns.

        Otherwise nothing could bring back a kind that is no longer tried.
        """
        for kind, (expected, accepted) in self._counts.items():
            self._counts[kind] = 1 + expected / 2, 1 + accepted / 2

    def to_record(self) -> dict[str, object]:
        """Return a record for a file; `from_record` is the inverse."""
        return {str(kind): counts for kind, counts in self._counts.items()}

    @classmethod
    def from_record(cls, record: Mapping[str, Sequence[float]]) -> Trust:
        """Read a record; raises ValueError, TypeError or KeyError for what cannot be trust."""
        known = cls()
        for kind in known._counts:
            expected, accepted = map(float, record[kind])
            known._counts[kind] = expected, accepted
            if not 0 < expected < math.inf or not 0 <= accepted < math.inf:
                raise ValueError(f"{record} cannot have been counted")
        return known


class AcceptanceStatistics:
    """Acceptance rates by width and depth, and accepted drafts by shape.

    shapes: the shapes to estimate, in the order of all arrays [S]
    trust:  how far continuations of the host are accepted
    biased: the same for rows with a grammar or penalties; None before the first, and not in records
    """

    def __init__(self, shapes: Iterable[BeamShape]) -> None:
        self.shapes = tuple(s for s in shapes if s.length > 1)
        self.trust = Trust()
        self.biased: AcceptanceStatistics | None = None
        self._bounds = bounds(self.shapes)
        W = max((s.width for s in self.shapes), default=1)
        D = max((s.length for s in self.shapes), default=2) - 1
        self._width, self._depth = np.arange(W)[:, None], np.arange(1, D + 1)
        # By depth: hits and trials of depth d + 1 with w + 1 beams, in steps where depth d was
        # accepted. By shape: accepted drafts and steps.
        self._by_depth, self._by_shape = np.zeros((2, W, D)), np.zeros((2, len(self.shapes)))
        self._by_depth[:, 0, 0] = _PRIOR * _FIRST_CHANCE, _PRIOR
        self._missed = 0  # last steps in which no draft was accepted

    def learn(self, *rows: StepResult) -> None:
        """Record one drafted step, with the result of each batch row."""
        missed = max([len(step.path) for step in rows]) == 1
        self._missed = self._missed + 1 if missed else 0
        share = _DECAY ** max(1, min(self._missed - 2, 4))
        self._by_depth *= share
        self._by_shape *= share
        W = len(self._width)
        for step in rows:
            beams = np.array(step.beams)
            reached = (beams[step.path] <= self._width).sum(axis=1, keepdims=True) - 1  # [W, 1]
            covered = (self._depth <= reached + 1) & (self._width < step.shape.width)  # [W, D]
            if _is_cut(step):
                deepest = np.zeros(max(W, step.shape.width), np.int64)
                np.maximum.at(deepest, beams, step.depths)
                covered &= self._depth <= np.minimum.accumulate(deepest)[:W, None]
            else:
                covered &= self._depth < step.shape.length
            self._by_depth += covered & (self._depth <= reached), covered
            covered, accepted = accepted_within(step, self._bounds)
            self._by_shape += covered * accepted, covered

    def of(self, *, biased: bool) -> AcceptanceStatistics:
        """Return the statistics of rows with a grammar or penalties (`biased`), or of the others.

        Grammars and penalties change the target, so such rows are no evidence about the others.
        """
        if biased and self.biased is None:
            self.biased = deepcopy(self)
        return self.biased if biased and self.biased else self

    def chances(self) -> Array:
        """Return [W, D], the chance that depth d + 1 is accepted if d was, with w + 1 beams."""
        rows: list[list[float]] = []
        for all_hits, all_trials in zip(*self._by_depth.tolist(), strict=True):
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
        accepted, steps = self._by_shape
        guess = expected_drafts(self.chances(), self._bounds)
        return 1 + (accepted + _PRIOR * guess) / (steps + _PRIOR)

    def steps(self) -> Array:
        """Return [S], the number of steps with evidence about each shape; older ones weigh less."""
        return self._by_shape[1]

    def accepted_by_depth(self, shape: BeamShape) -> list[float]:
        """Return the chance that a draft of each depth is accepted, for a shape that is not cut."""
        of_width: list[float] = _reached(self.chances())[shape.width - 1].tolist()
        return of_width[: shape.length - 1]

    def continued(self, shapes: Iterable[BeamShape]) -> AcceptanceStatistics:
        """Return statistics of `shapes` for the next answer, with half of this evidence.

        The trust in continuations is shared.
        """
        other = AcceptanceStatistics(shapes)
        _, W, D = np.minimum(self._by_depth.shape, other._by_depth.shape)
        other._by_depth[:, :W, :D] = self._by_depth[:, :W, :D] / 2
        # The first chance has no neighbour to be guessed from, so its evidence never fades away.
        other._by_depth[:, 0, 0] *= max(1.0, _PRIOR / other._by_depth[1, 0, 0])
        known = {shape: i for i, shape in enumerate(self.shapes)}
        for i, shape in enumerate(other.shapes):
            if shape in known:
                other._by_shape[:, i] = self._by_shape[:, known[shape]] / 2
        other.trust = self.trust
        other.biased = self.biased and self.biased.continued(shapes)
        return other

    def to_record(self) -> dict[str, object]:
        """Return a record for a file; `from_record` is the inverse."""
        shapes = [[s.width, s.length, s.nodes] for s in self.shapes]
        return {
            "shapes": shapes,
            "by_shape": self._by_shape.tolist(),
            "by_depth": self._by_depth.tolist(),
            "trust": self.trust.to_record(),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> AcceptanceStatistics:
        """Read a record; raises ValueError, TypeError or KeyError if it cannot be statistics."""
        known = cls(BeamShape(w, n, nodes) for w, n, nodes in record["shapes"])
        for counts, stored in (
            (known._by_shape, np.array(record["by_shape"], float)),
            (known._by_depth, np.array(record["by_depth"], float)),
        ):
            if stored.shape != counts.shape or not np.all(np.isfinite(stored) & (stored >= 0)):
                raise ValueError(f"no counts of {len(known.shapes)} shapes")
            counts[...] = stored
        hits, trials = known._by_depth
        if trials[0, 0] == 0 or np.any(hits > trials * 1.000001):
            raise ValueError("more was accepted than drafted, or nothing was drafted")
        known.trust = Trust.from_record(record["trust"])
        return known


def bounds(shapes: Sequence[BeamShape]) -> NDArray[np.int64]:
    """Return [3, S, 1]: width, length and nodes of each shape."""
    each = [(s.width, s.length, s.nodes) for s in shapes]
    return np.array(each, np.int64).reshape(-1, 3).T[:, :, None]


def expected_drafts(chances: Array, shapes: NDArray[np.int64]) -> Array:
    """Return the expected accepted drafts of shapes: a sum over their likeliest nodes but the root.

    Shapes:
      chances: [W, D], the chance that depth d + 1 is accepted if d was, with w + 1 beams
      shapes:  [3, S, 1], see `bounds`
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


def accepted_within(
    step: StepResult, shapes: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return what a step shows about other shapes, [3, S, 1] as from `bounds`.

    Returns:
      covered:  [S], whether the step is evidence about the shape
      accepted: [S], the number of drafts that the shape would have had accepted
    """
    width, length, nodes = shapes
    inside = (np.array(step.beams) < width) & (np.array(step.depths) < length)  # [S, N]
    rank = inside.cumsum(axis=1)
    accepted = (inside & (rank <= nodes))[:, step.path].sum(axis=1) - 1
    covered = (width <= step.shape.width) & (length <= step.shape.length)
    if _is_cut(step):
        covered &= rank[:, -1:] >= nodes
    return covered[:, 0], accepted


def _reached(chances: Array) -> Array:
    """Return [W, D], the chance that depth d + 1 is accepted with w + 1 beams."""
    reached: Array = np.maximum.accumulate(chances.cumprod(axis=1), axis=0)
    return reached


def _is_cut(step: StepResult) -> bool:
    """Whether the node capacity may have cut nodes of the beams."""
    full = step.shape.width * (step.shape.length - 1) + 1
    return len(step.beams) == step.shape.nodes < full
