"""A simulated machine and text: the cost of steps and the drafts that they accept."""

from __future__ import annotations

import random
from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.decoding.sequence import Drafted as Made
from redrafter_mlx.decoding.sequence import Proposal, Sequence
from redrafter_mlx.drafting.untrained.ngram import NgramIndex
from redrafter_mlx.response import Source, StepResult
from redrafter_mlx.tuning.acceptance import AcceptanceStatistics
from redrafter_mlx.tuning.corrections import Corrections
from redrafter_mlx.tuning.cost import CostModel, Setup
from redrafter_mlx.tuning.policy import TunedPolicy
from redrafter_mlx.tuning.profile import ROWS

SETUP = Setup("chip", "model", "drafter", "float32", "0.0", "none")
_VOCAB, _WORDS = 6, 60
"""Number of tokens that may be drafted, and of those in the text where it ignores the drafter."""

_CONTEXTS = 100
"""Number of positions with their own distributions; each step falls on one at random."""

_LATE = 2
"""Steps between the choice of a shape and the first result with it, as in the decoding loop."""


def machine(
    call: Callable[[int], float],
    drafting: Callable[[int, int], float] = lambda w, n: (1 + 0.1 * w) * (n - 1),
    widest: int = 4,
    longest: int = 8,
) -> CostModel:
    """Return measured costs, from functions of query rows and of (width, length), in ms."""
    short = tuple((rows, call(rows) / 1e3) for rows in ROWS)
    long = tuple((rows, 1.2 * call(rows) / 1e3) for rows in ROWS)
    shapes = [(w, n) for w in range(1, widest + 1) for n in range(2, longest + 1)]
    draft = tuple((w, n, drafting(w, n) / 1e3) for w, n in shapes)
    return CostModel(SETUP, 128, 2048, short, long, draft, spread=0.02)


def machine_of_batches(
    call: Callable[[int], float],
    drafting: Callable[[int, int], float] = lambda w, n: (1 + 0.1 * w) * (n - 1),
) -> CostModel:
    """Return the costs of a `machine` as if more rows and beams were measured, those of batches."""
    known = machine(call, drafting)
    more = tuple((rows, call(rows) / 1e3) for rows in (40, 48, 64, 96, 128))
    beams = sorted({width * batch for width in range(1, 5) for batch in (2, 4, 8)} - {1, 2, 3, 4})
    draft = tuple((w, n, drafting(w, n) / 1e3) for w in beams for n in (2, 4))
    return replace(known, short=known.short + more, draft=known.draft + draft)


def cliff(at: int, height: float = 20.0) -> Callable[[int], float]:
    """Return 20 ms, a little more for each row, and `height` more for over `at` rows."""
    return lambda rows: 20.0 + 0.2 * rows + (height if rows > at else 0.0)


def step_result(
    shape: BeamShape,
    beams: list[int],
    depths: list[int],
    path: list[int],
    from_host: bool = False,
    seconds: float | None = None,
) -> StepResult:
    """Return the result of a verified tree, as the policy receives it."""
    sources: list[Source] = [*["drafter"] * (len(path) - 1), "model"]
    return StepResult(
        [0] * len(path), sources, path, beams, depths, shape, shape.nodes, from_host, seconds
    )


Prefix = tuple[int, ...]


class Drafted(NamedTuple):
    """The packed tree of a beam search, with the index, beam and depth of each node."""

    nodes: dict[Prefix, int]
    beams: list[int]
    depths: list[int]


class Context:
    """A position of a text: a random distribution after each prefix, and the trees drafted here."""

    def __init__(self, number: int, sharpness: float) -> None:
        self._number, self._sharpness = number, sharpness
        self._distributions: dict[Prefix, list[float]] = {}
        self._drafted: dict[BeamShape, Drafted] = {}

    def distribution(self, prefix: Prefix) -> list[float]:
        """Return the distribution after a prefix; the order of calls does not matter.

        So all tests can share one context.
        """
        if prefix not in self._distributions:
            rng = random.Random(f"{self._number} {prefix}")
            raw = [2.718 ** (self._sharpness * rng.gauss(0, 1)) for _ in range(_VOCAB)]
            self._distributions[prefix] = [x / sum(raw) for x in raw]
        return self._distributions[prefix]

    def draft(self, shape: BeamShape) -> Drafted:
        if shape not in self._drafted:
            self._drafted[shape] = self._search(shape)
        return self._drafted[shape]

    def _search(self, shape: BeamShape) -> Drafted:
        beams: list[tuple[float, Prefix]] = [(1.0, ())]
        owner: dict[Prefix, int] = {(): 0}
        scores: dict[Prefix, float] = {(): 1.0}
        for _ in range(shape.length - 1):
            longer = [
                (p * q, (*prefix, token))
                for p, prefix in beams
                for token, q in enumerate(self.distribution(prefix))
            ]
            beams = sorted(longer, reverse=True)[: shape.width]
            for number, (score, tokens) in enumerate(beams):
                owner[tokens] = max(number, owner[tokens[:-1]])
                scores[tokens] = score
        order = sorted(owner, key=lambda prefix: (-scores[prefix], len(prefix)))
        nodes = {prefix: i for i, prefix in enumerate(order[: shape.nodes])}
        return Drafted(nodes, [owner[n] for n in nodes], [len(n) for n in nodes])


@cache
def context(number: int, sharpness: float) -> Context:
    return Context(number, sharpness)


class Text:
    """A text and its drafter, whose `skill` is between 0 (no knowledge) and 1 (the best possible).

    Drafting is a beam search over random distributions, so that beams, their order and the cut of
    a tree are as with a real drafter. The text is drawn from those distributions with probability
    `skill`, and uniformly otherwise.
    """

    def __init__(self, skill: float, seed: int = 0, sharpness: float = 2.5) -> None:
        self.skill = skill
        self._sharpness = sharpness
        self._rng = random.Random(seed)

    def step(self, shape: BeamShape) -> StepResult:
        """Draft, pack and accept at a random position of the text."""
        if shape.length == 1:
            return step_result(shape, [0], [0], [0])
        here = context(self._rng.randrange(_CONTEXTS), self._sharpness)
        drafted = here.draft(shape)
        path, prefix = [0], ()
        while True:
            prefix = (*prefix, self._next(here.distribution(prefix)))
            if prefix not in drafted.nodes:
                break
            path.append(drafted.nodes[prefix])
        return step_result(shape, drafted.beams, drafted.depths, path)

    def tokens(self, shape: BeamShape) -> float:
        """Return the expected tokens per step of one shape."""
        if shape.length == 1:
            return 1.0
        return expected_tokens(shape, self.skill, self._sharpness)

    def _next(self, distribution: list[float]) -> int:
        if self._rng.random() < self.skill:
            return self._rng.choices(range(_VOCAB), distribution)[0]
        return self._rng.randrange(_WORDS)


@cache
def expected_tokens(shape: BeamShape, skill: float, sharpness: float) -> float:
    """Return the exact expectation: the mean over positions of the summed node probabilities."""
    total = 0.0
    for number in range(_CONTEXTS):
        here = context(number, sharpness)
        chances: dict[Prefix, float] = {(): 1.0}
        for node in here.draft(shape).nodes:
            if node:
                q = here.distribution(node[:-1])[node[-1]]
                chances[node] = chances[node[:-1]] * (skill * q + (1 - skill) / _WORDS)
        total += sum(chances.values())
    return total / _CONTEXTS


def sequence(
    committed: int = 128, text: NgramIndex | None = None, *, biased: bool = False
) -> Sequence:
    """Return a batch row that does not end."""
    return Sequence(lambda _: False, committed, () if text is None else (text,), biased=biased)


class AnswerPolicy:
    """The batch policy for a batch of one row, a single answer."""

    def __init__(
        self,
        costs: CostModel,
        acceptance: AcceptanceStatistics | None = None,
        times: Corrections | None = None,
    ) -> None:
        self.batch = TunedPolicy(costs, acceptance, times)
        self._row = sequence()

    @property
    def acceptance(self) -> AcceptanceStatistics:
        return self.batch.acceptance

    def propose(self, length: int) -> BeamShape:
        self._row.committed = length
        return self.batch.propose([self._row]).shape

    def revise(self, text: NgramIndex, drafted: BeamShape, *, drawn: bool) -> Proposal | None:
        self._row.sources = (text,)
        return self.batch.revise([self._row], [Made(drafted, drawn)])[0]

    def learn(self, step: StepResult) -> None:
        self.batch.learn([self._row], [step])


class Taken(NamedTuple):
    """A step's shape, its seconds, and its expected tokens."""

    shape: BeamShape
    seconds: float
    tokens: float


def decode(
    policy: AnswerPolicy, costs: CostModel, texts: Iterable[Text], length: int = 128
) -> list[Taken]:
    """Let the policy choose each step's shape, a step per text; steps take the time of `costs`."""
    taken = []
    unread: list[StepResult] = []
    for text in texts:
        shape = policy.propose(length)
        taken.append(Taken(shape, costs.step(shape, length), text.tokens(shape)))
        unread.append(replace(text.step(shape), seconds=taken[-1].seconds))
        if len(unread) > _LATE:
            policy.learn(unread.pop(0))
    return taken


def pace(steps: abc.Sequence[Taken]) -> float:
    """Return tokens per second of the chosen shapes, from expected instead of sampled tokens."""
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def every_shape(widest: int = 4, longest: int = 8, max_rows: int = 32) -> list[BeamShape]:
    """Return plain decoding and all shapes whose capacity has room for one draft per beam."""
    return [PLAIN] + [
        BeamShape(w, n, nodes)
        for w in range(1, widest + 1)
        for n in range(2, longest + 1)
        for nodes in range(max(n, w + 1), min(w * (n - 1) + 1, max_rows) + 1)
    ]
