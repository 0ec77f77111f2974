"""Drafting without a drafter: where the text's end stood before, what followed may follow again.

    text so far        the cat sat on the mat . then the cat | sat on the
    its end            the cat
    where it stood     ^^^^^^^ sat on the mat                   -> drafts sat, on, the

Answers that quote (summaries, edits of code, extraction) repeat their question; those that loop
repeat themselves. Nothing is trained, and nothing is read on the host: the text is on the device,
and all its places are compared at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx

from redrafter_mlx.config import MAX_BEAM_WIDTH, BeamShape, SamplingParams
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.proposer import DraftInput, SamplingProposer
from redrafter_mlx.rejection import SampledDrafts
from redrafter_mlx.tree import Beams, join_beams

LOOKUP_SHAPE = BeamShape(2, 8, 8)
"""Eight rows are the most that Metal's attention takes in its vector kernel (fewer where more than
four query heads share a key head). Long drafts cost no more than short ones, and a second match
fills what the first leaves free: on answers of SmolLM2, 1 to 3% more tokens/step than one chain of
as many nodes."""

_WORD, _SUFFIX = "lookup", "+lookup"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Lookup:
    """Proposes what followed the longest earlier occurrences of the text's end.

    Of equally long ones, the most recent come first; occurrences that were followed by the same
    tokens count once. Without an occurrence there are no drafts, and the tree is its root.

    shortest: fewer matching tokens are no occurrence
    kept:     how often a draft is right behind 1, 2, ... matching tokens, the last for all longer
              ones; matches are compared up to that length. Only the order of drafts depends on it
    second:   how much less often that is so for the next candidate than for the one before

    The rates are those counted on 243 answers of SmolLM2-135M-Instruct to short questions; that
    each right draft makes the match one longer fits them within 0.05.
    """

    shortest: int = 1
    kept: tuple[float, ...] = (0.20, 0.53, 0.62, 0.70, 0.74)
    second: float = 0.35

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= len(self.kept):
            raise BadInputError(f"shortest is {self.shortest}; it must be 1 to {len(self.kept)}")
        for name, rates in (("kept", self.kept), ("second", (self.second,))):
            if any(not 0 < rate <= 1 for rate in rates) or list(rates) != sorted(rates):
                raise BadInputError(f"{name} is {rates}; give rising shares above 0, up to 1")

    @property
    def reads_text(self) -> bool:
        return True

    @property
    def reads_context(self) -> tuple[int, ...]:
        return ()

    @property
    def reads_layers(self) -> tuple[int, ...]:
        return ()

    @property
    def beam_shape(self) -> BeamShape:
        return LOOKUP_SHAPE

    def propose(self, given: DraftInput, shape: BeamShape) -> Beams:
        """Up to W candidates, best first; those that were not found end behind the root."""
        text, position, W, L = given.text, given.position, shape.width, shape.length
        assert text is not None, "a proposer with reads_text is given the text"
        B, C = text.shape
        place = mx.arange(C)[None]
        matched = match_lengths(text, position, len(self.kept))
        # Longest first, then most recent: a later place never outweighs a longer match.
        rank = mx.where(matched >= self.shortest, matched * C + place, -1)
        tokens, scores = [], []
        for w in range(W):
            best = mx.argmax(rank, axis=1, keepdims=True)  # [B, 1]
            found = mx.take_along_axis(rank, best, axis=1) >= 0
            length = mx.take_along_axis(matched, best, axis=1)
            drafts = followers(text, position, best, L - 1)  # [B, 1, L - 1]
            tokens.append(mx.where(found, drafts[:, 0], 0))
            scores.append(mx.where(found, self._scores(length, L - 1, w), -mx.inf))
            if w < W - 1:
                alike = mx.all(followers(text, position, place, L - 1) == drafts, axis=2)
                rank = mx.where(alike, -1, rank)
        root = mx.broadcast_to(given.root[:, None, None], (B, W, 1))
        return Beams(
            mx.concatenate([root, mx.stack(tokens, axis=1)], axis=2),
            mx.pad(mx.stack(scores, axis=1), [(0, 0), (0, 0), (1, 0)]),
        )

    def _scores(self, matched: mx.array, count: int, rank: int) -> mx.array:
        """Log-probabilities [B, count]: each draft that is right makes the match one longer."""
        longest = len(self.kept)
        at = mx.clip(matched - 1 + mx.arange(count)[None], 0, longest - 1)
        step = mx.log(mx.array(self.kept, mx.float32))[at]
        return mx.cumsum(step, axis=1) + rank * mx.log(mx.array(self.second, mx.float32))


def split_lookup(drafter: _T | str) -> tuple[_T | str | None, bool]:
    """What names the drafter itself, and whether the text is looked up (as well).

    "lookup" is a lookup alone, "FOLDER+lookup" a drafter and a lookup; anything else is itself.
    """
    if not isinstance(drafter, str):
        return drafter, False
    if drafter == _WORD:
        return None, True
    name = drafter.removesuffix(_SUFFIX)
    if not name:
        raise BadInputError(f"drafter is {drafter!r}; name a drafter before {_SUFFIX}")
    return name, name != drafter


def join_lookup(drafter: object | None) -> str:
    """The name that `split_lookup` takes apart into `drafter` and True."""
    return _WORD if drafter is None else f"{drafter}{_SUFFIX}"


@dataclass(frozen=True)
class Both:
    """Branches of a drafter and of a lookup in one tree, whichever are likelier.

    Half of the beams, rounded down and at most `looked_up` of them, are the lookup's. A single
    beam is the one of which more is expected to be kept: in a text that repeats itself the
    lookup's, otherwise mostly the drafter's. Rejection draws from the drafter alone, for a lookup
    has no distribution.

    longest: the drafter's candidates end there, the root counted. It pays for each token that it
             drafts and is seldom right so far on; a lookup's long drafts cost nothing
    """

    drafter: SamplingProposer
    lookup: Lookup
    looked_up: int = 2
    longest: int = 4

    @property
    def reads_text(self) -> bool:
        return True

    @property
    def reads_context(self) -> tuple[int, ...]:
        return self.drafter.reads_context

    @property
    def reads_layers(self) -> tuple[int, ...]:
        return self.drafter.reads_layers

    def beam_shape(self, drafter: BeamShape) -> BeamShape:
        """One beam more than the drafter's own shape has, in as many nodes."""
        return BeamShape(min(drafter.width + 1, MAX_BEAM_WIDTH), drafter.length, drafter.nodes)

    def propose(self, given: DraftInput, shape: BeamShape) -> Beams:
        """The candidates of both; what both propose has the better of their scores.

        They stand in turn, of the first two the one that promises more in front, so that the first
        W of more beams are what W beams would be.
        """
        width = max(shape.width, 2)
        mine = min(width // 2, self.looked_up)
        theirs = width - mine
        drafted = self.drafter.propose(given, BeamShape(theirs, min(shape.length, self.longest)))
        drafted = _ended_before(drafted, shape.length)
        looked_up = self.lookup.propose(given, BeamShape(mine, shape.length))
        turn = mx.array(sorted(range(width), key=lambda w: w if w < theirs else w - theirs))
        better = _expected(looked_up) > _expected(drafted)  # [B, 1]
        first_two = mx.where(better, turn[1::-1], turn[:2])
        behind = mx.broadcast_to(turn[2:], (better.shape[0], width - 2))
        order = mx.concatenate([first_two, behind], axis=1)
        both = _in_order(join_beams(drafted, looked_up), order)
        return both if shape.width > 1 else Beams(both.tokens[:, :1], both.log_probs[:, :1])

    def draw(
        self, given: DraftInput, keys: mx.array, shape: BeamShape, params: SamplingParams
    ) -> SampledDrafts:
        """The drafter's own draws."""
        return self.drafter.draw(given, keys, shape, params)


def _ended_before(beams: Beams, length: int) -> Beams:
    """Candidates of `length` that end where the given ones do."""
    B, W, L = beams.tokens.shape
    behind = [(0, 0), (0, 0), (0, length - L)]
    itself = mx.broadcast_to(mx.arange(W)[None, :, None], (B, W, length - L))
    return Beams(
        mx.pad(beams.tokens, behind),
        mx.pad(beams.log_probs, behind, constant_values=-mx.inf),
        mx.concatenate([beams.goes_on_from, itself], axis=2),
    )


def _in_order(beams: Beams, order: mx.array) -> Beams:
    """The same prefixes under other numbers: in place i of each length the one of order[b, i].

    Shapes:
      order: [B, W] int32, a permutation
    """
    rows = order[:, :, None]
    origins = mx.take_along_axis(beams.goes_on_from, rows, axis=1)
    number = mx.argsort(order, axis=1).astype(mx.int32)[:, :, None]  # which place each has now
    return Beams(
        mx.take_along_axis(beams.tokens, rows, axis=1),
        mx.take_along_axis(beams.log_probs, rows, axis=1),
        mx.take_along_axis(number, origins, axis=1),
    )


def _expected(beams: Beams) -> mx.array:
    """How many drafts [B, 1] of the first candidate are expected to be kept."""
    return mx.sum(mx.exp(beams.log_probs[:, :1, 1:]), axis=2)


def match_lengths(text: mx.array, position: mx.array, longest: int) -> mx.array:
    """How many tokens up to each place are also the text's last ones.

    With text a b c a b and position 4: 0 2 0 0 0; the text's own end counts for nothing.

    Shapes:
      text:     [B, C] int32
      position: [B] int32, the place of the last token
    Returns:
      [B, C] int32, at most `longest`
    """
    C = text.shape[1]
    place = mx.arange(C)[None]
    back = position[:, None] - mx.arange(longest)[None]  # the text's end, last token first
    end = mx.where(back >= 0, mx.take_along_axis(text, mx.maximum(back, 0), axis=1), -1)
    before = mx.pad(text, [(0, 0), (longest - 1, 0)], constant_values=-2)
    alike = place < position[:, None]
    length = mx.zeros(text.shape, mx.int32)
    for k in range(longest):
        first = longest - 1 - k
        alike = alike & (before[:, first : first + C] == end[:, k : k + 1])
        length = length + alike.astype(mx.int32)
    return length


def followers(text: mx.array, position: mx.array, place: mx.array, count: int) -> mx.array:
    """The `count` tokens behind each place, going on where the text ends.

    A text that ends d places behind a match repeats itself every d tokens if the match is right,
    so behind its end the same d tokens come again: a loop is drafted to any length.

    Shapes:
      text:     [B, C] int32
      position: [B] int32, the place of the last token
      place:    [B, P] int32
    Returns:
      [B, P, count] int32; means nothing for places from `position` on
    """
    B, C = text.shape
    place = mx.broadcast_to(place, (B, place.shape[1]))[:, :, None]
    period = mx.maximum(position[:, None, None] - place, 1)
    index = mx.minimum(place + 1 + mx.arange(count)[None, None] % period, C - 1)
    return mx.take_along_axis(text, index.reshape(B, -1), axis=1).reshape(index.shape)
