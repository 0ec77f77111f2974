"""How likely drafts are to be accepted, learned from the steps that were taken.

The tree that a step verified holds the trees of all smaller shapes, or nearly: with fewer beams the
search would have gone on from fewer prefixes, and now and then have kept one that more beams drop.
A node's `beam` is how few are enough to reach it, counted from 0, and nodes stand likeliest first,
so a shape of width w, length l and n nodes would have had the first n of the nodes whose beam is
below w and whose depth is below l:

    root -+- is -+- a -+- red     beam 0, beam 1     W = 1, L = 3 would have had   is, a
          |      |     `- small   beam 1             W = 1, L = 4                  is, a, red
          |      `- dark          beam 1             W = 2, L = 3                  is, red, a, dark
          `- red                  beam 1

One step therefore tells how many drafts each smaller shape would have got accepted. For larger
shapes the odds are carried on: a depth not seen lately is as good as the depth above it, and a
further beam makes good a share of what the narrower ones missed. What was seen is forgotten
exponentially, so these guesses come back, and are put to the test when they promise enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from redrafter_mlx.config import BeamShape

KEPT = 0.94
"""What a step that drafted leaves of the evidence before it: half of it in 11 steps."""

_KEPT_PLAIN = 0.99
"""The same for a step that did not draft."""

_LEAST_TRIALS = 2.0
"""Evidence on the first draft never fades below so many trials: plain decoding does not make a
drafter look better."""

_FIRST_TRIALS, _FIRST_CHANCE = 2.0, 0.6
"""What is assumed of an unknown drafter's first draft, and how firmly."""

_DOUBT = 2.0
"""So many trials weigh as much as the guess from a neighbouring depth or width."""

_COPIES_KEPT = 0.9
"""What a step with copies leaves of the evidence on copies before it."""

_FIRST_COPIES, _FIRST_TRUST = 6.0, 0.9
"""Of an unknown text: copied tokens that were expected to be accepted, and the share that was."""

_RESCUE = 0.35
"""One more beam is assumed to make good this share of the misses, times the narrower beams' own
chance: a drafter whose first guesses are worth nothing has no better second ones."""


class Verified(Protocol):
    """A tree that was verified, and what was accepted of it.

    shape:  what it was drafted with
    beams:  of each node that is not padding, in tree order, one less than the beams that reach it
    depths: of the same nodes
    path:   the accepted nodes, root first
    copied: whether copies of the text were in the tree: it says nothing of the drafter then
    """

    @property
    def shape(self) -> BeamShape: ...
    @property
    def beams(self) -> Sequence[int]: ...
    @property
    def depths(self) -> Sequence[int]: ...
    @property
    def path(self) -> Sequence[int]: ...
    @property
    def copied(self) -> bool: ...


class Odds:
    """The chance of acceptance by depth and width, and the accepted drafts by shape.

    `chance(w, d)` is that of depth d being accepted by w beams, once depth d - 1 was.
    """

    def __init__(self, shapes: Iterable[BeamShape]) -> None:
        """`shapes` are those that tokens will be asked for."""
        self.shapes = tuple(s for s in shapes if s.length > 1)
        self._widest = max((s.width for s in self.shapes), default=1)
        self._deepest = max((s.length for s in self.shapes), default=2) - 1
        rows, columns = range(self._widest + 1), range(self._deepest + 1)
        self._trials = [[0.0 for _ in columns] for _ in rows]
        self._hits = [[0.0 for _ in columns] for _ in rows]
        self._trials[1][1] = _FIRST_TRIALS
        self._hits[1][1] = _FIRST_TRIALS * _FIRST_CHANCE
        self._copies_expected = _FIRST_COPIES
        self._copies_accepted = _FIRST_COPIES * _FIRST_TRUST
        self._seen = dict.fromkeys(self.shapes, 0.0)
        self._accepted = dict.fromkeys(self.shapes, 0.0)

    def learn(self, step: Verified) -> None:
        """Count one step that drafted."""
        self._fade(KEPT)
        for width in range(1, min(step.shape.width, self._widest) + 1):
            reached = sum(step.beams[node] < width for node in step.path) - 1
            deepest = min(_depth_covered(step, width), self._deepest)
            for depth in range(1, min(reached + 1, deepest) + 1):
                self._trials[width][depth] += 1
                self._hits[width][depth] += depth <= reached
        for shape, accepted in accepted_within(step, self.shapes).items():
            self._seen[shape] += 1
            self._accepted[shape] += accepted

    def learn_copies(self, expected: float, accepted: int) -> None:
        """Count one step with a copy of which so many drafts were expected to be accepted."""
        self._copies_expected = _COPIES_KEPT * self._copies_expected + expected
        self._copies_accepted = _COPIES_KEPT * self._copies_accepted + accepted

    @property
    def copies_trust(self) -> float:
        """What share of the expected copied tokens has been accepted lately."""
        return self._copies_accepted / self._copies_expected

    def rest(self) -> None:
        """Count one step that did not draft."""
        self._fade(_KEPT_PLAIN)

    def calmed(self, shapes: Iterable[BeamShape]) -> Odds:
        """The odds to begin another text with, held less firmly; `shapes` as for new ones."""
        other = Odds(shapes)
        for mine, theirs in ((self._trials, other._trials), (self._hits, other._hits)):
            for row, their_row in zip(mine, theirs, strict=False):
                known = min(len(row), len(their_row))
                their_row[:known] = row[:known]
        for shape in {*self.shapes} & {*other.shapes}:
            other._seen[shape] = self._seen[shape]
            other._accepted[shape] = self._accepted[shape]
        other._copies_expected = self._copies_expected
        other._copies_accepted = self._copies_accepted
        other._fade(0.5)
        return other

    def chances(self) -> list[list[float]]:
        """chance[w - 1][d - 1] for all widths and depths."""
        rows: list[list[float]] = []
        for width in range(1, self._widest + 1):
            row: list[float] = []
            for depth in range(1, self._deepest + 1):
                hits, trials = self._hits[width][depth], self._trials[width][depth]
                if width == depth == 1:
                    row.append(hits / trials)
                    continue
                if width == 1:
                    guess = row[-1]
                else:
                    narrower = rows[-1][depth - 1]
                    guess = narrower + (1 - narrower) * narrower * _RESCUE
                row.append((hits + _DOUBT * guess) / (trials + _DOUBT))
            rows.append(row)
        return rows

    def tokens(self) -> dict[BeamShape, float]:
        """Expected tokens of a step of each shape, the bonus token included."""
        values = node_values(self.chances())
        expected = {}
        for shape in self.shapes:
            guess = expected_drafts(values, shape)
            seen, accepted = self._seen[shape], self._accepted[shape]
            expected[shape] = 1 + (accepted + _DOUBT * guess) / (seen + _DOUBT)
        return expected

    def seen(self, shape: BeamShape) -> float:
        """How many steps have told of a shape, older ones counting less."""
        return self._seen[shape]

    def reach(self, shape: BeamShape) -> list[float]:
        """The chance that a draft of each depth is accepted, of a shape whose nodes all fit."""
        rows = node_values(self.chances())[: shape.width]
        return [sum(at_depth) for at_depth in zip(*rows, strict=True)][: shape.length - 1]

    def _fade(self, kept: float) -> None:
        for table in (self._trials, self._hits):
            first = table[1][1]
            for row in table:
                row[:] = [kept * x for x in row]
            table[1][1] = first
        least = kept if self._trials[1][1] * kept > _LEAST_TRIALS else 1.0
        self._trials[1][1] *= least
        self._hits[1][1] *= least
        for counts in (self._seen, self._accepted):
            for shape in counts:
                counts[shape] *= kept


def node_values(chances: Sequence[Sequence[float]]) -> list[list[float]]:
    """The chance that the node of each beam at each depth is accepted.

    Beam w adds to depth d what w + 1 beams reach and w do not.

    Args:
      chances: chances[w - 1][d - 1], of depth d being accepted by w beams once d - 1 was
    """
    values: list[list[float]] = []
    before = [0.0] * len(chances[0])
    for row in chances:
        reach, reached = [], 1.0
        for depth, chance in enumerate(row):
            reached *= chance
            reach.append(max(reached, before[depth]))
        values.append([more - less for more, less in zip(reach, before, strict=True)])
        before = reach
    return values


def expected_drafts(values: Sequence[Sequence[float]], shape: BeamShape) -> float:
    """Expected accepted drafts of a shape: the sum over its likeliest nodes, the root aside."""
    nodes = [v for row in values[: shape.width] for v in row[: shape.length - 1]]
    if shape.nodes - 1 < len(nodes):
        nodes = sorted(nodes, reverse=True)[: shape.nodes - 1]
    return sum(nodes)


def accepted_within(step: Verified, shapes: Iterable[BeamShape]) -> dict[BeamShape, int]:
    """How many drafts each of `shapes` would have got accepted; those that it cannot tell of are
    left out."""
    found: dict[BeamShape, int] = {}
    places: dict[tuple[int, int], tuple[int, list[int]]] = {}
    cut = _was_cut(step)
    for shape in shapes:
        width, length = shape.width, shape.length
        if width > step.shape.width or length > step.shape.length:
            continue
        if (width, length) not in places:
            places[width, length] = _places_within(step, width, length)
        nodes, path = places[width, length]
        if nodes >= shape.nodes or not cut:
            found[shape] = sum(place < shape.nodes for place in path) - 1
    return found


def _places_within(step: Verified, width: int, length: int) -> tuple[int, list[int]]:
    """Of the nodes that fewer and shorter beams have: how many, and where the path is in them."""
    inside, path, on_path = 0, [], set(step.path)
    for node, (beam, depth) in enumerate(zip(step.beams, step.depths, strict=True)):
        if beam < width and depth < length:
            if node in on_path:
                path.append(inside)
            inside += 1
    return inside, path


def _was_cut(step: Verified) -> bool:
    """Whether nodes of the beams may have found no room."""
    full = step.shape.width * (step.shape.length - 1) + 1
    return len(step.beams) == step.shape.nodes < full


def _depth_covered(step: Verified, width: int) -> int:
    """The depth to which the first `width` beams are in the tree whole."""
    if not _was_cut(step):
        return step.shape.length - 1
    deepest = [0] * width
    for beam, depth in zip(step.beams, step.depths, strict=True):
        if beam < width:
            deepest[beam] = max(deepest[beam], depth)
    return min(deepest)
