"""A machine and a text made up: what steps cost and what they accept, in pure Python."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from redrafter_mlx.autotune.cost_model import CostCurves, Setup
from redrafter_mlx.autotune.policy import ShapePolicy
from redrafter_mlx.config import PLAIN, BeamShape

SETUP = Setup("chip", "model", "drafter", "float32", "0.0", "none")
ROWS = (*range(1, 18), 20, 24, 28, 32)
_VOCAB = 6
_LATE = 2
"""Steps between a choice and the first look at what came of it, as in the decoding loop."""


def machine(
    call: Callable[[int], float],
    drafting: Callable[[int, int], float] = lambda w, n: (1 + 0.1 * w) * (n - 1),
    widest: int = 4,
    longest: int = 8,
    rows: Iterable[int] = ROWS,
) -> CostCurves:
    """Curves from functions of rows and of (width, length), in milliseconds."""
    points = [(r, call(r) / 1e3) for r in rows]
    return CostCurves(
        setup=SETUP,
        short_context=128,
        long_context=2048,
        short=tuple(points),
        long=tuple((r, 1.2 * s) for r, s in points),
        draft=tuple(
            (w, n, drafting(w, n) / 1e3)
            for w in range(1, widest + 1)
            for n in range(2, longest + 1)
        ),
        plain_rest=0.5e-3,
        chain_rest=1e-3,
        drafted_rest=1e-3,
        spread=0.02,
    )


def cliff(at: int, height: float = 20.0) -> Callable[[int], float]:
    """20 ms, a little more for each row, and `height` more from the row behind `at` on."""
    return lambda rows: 20.0 + 0.2 * rows + (height if rows > at else 0.0)


@dataclass(frozen=True)
class Step:
    """A verified tree, as the policy sees it."""

    shape: BeamShape
    beams: list[int]
    depths: list[int]
    path: list[int]
    copied: bool = False


class Text:
    """A drafter and a text of which it guesses as much as `skill` says, 0 nothing, 1 all it can.

    Drafting is a beam search over random distributions, so that beams, their order and the cut of
    a tree are what they are with a drafter; the text follows those distributions, or at random.
    """

    def __init__(self, skill: float, seed: int = 0, sharpness: float = 2.5) -> None:
        self.skill = skill
        self._sharpness = sharpness
        self._rng = random.Random(seed)

    def step(self, shape: BeamShape) -> Step:
        """Draft, pack and accept behind a fresh place of the text."""
        if shape.length == 1:
            return Step(shape, [0], [0], [0])
        known: dict[tuple[int, ...], list[float]] = {}
        beams: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
        owner: dict[tuple[int, ...], int] = {(): 0}
        for _ in range(shape.length - 1):
            longer = [
                (p * q, (*prefix, token))
                for p, prefix in beams
                for token, q in enumerate(self._distribution(known, prefix))
            ]
            beams = sorted(longer, reverse=True)[: shape.width]
            for number, (_, tokens) in enumerate(beams):
                owner[tokens] = max(number, owner[tokens[:-1]])
        order = sorted(owner, key=lambda prefix: (-self._likelihood(known, prefix), len(prefix)))
        nodes = order[: shape.nodes]
        path, prefix = [0], ()
        while True:
            prefix = (*prefix, self._say(self._distribution(known, prefix)))
            if prefix not in nodes:
                break
            path.append(nodes.index(prefix))
        return Step(shape, [owner[n] for n in nodes], [len(n) for n in nodes], path)

    def tokens(self, shape: BeamShape, steps: int) -> float:
        """Tokens per step of one shape, by trying it."""
        return sum(len(self.step(shape).path) for _ in range(steps)) / steps

    def _distribution(
        self, known: dict[tuple[int, ...], list[float]], prefix: tuple[int, ...]
    ) -> list[float]:
        if prefix not in known:
            raw = [2.718 ** (self._sharpness * self._rng.gauss(0, 1)) for _ in range(_VOCAB)]
            known[prefix] = [x / sum(raw) for x in raw]
        return known[prefix]

    def _likelihood(
        self, known: dict[tuple[int, ...], list[float]], prefix: tuple[int, ...]
    ) -> float:
        product = 1.0
        for depth, token in enumerate(prefix):
            product *= self._distribution(known, prefix[:depth])[token]
        return product

    def _say(self, distribution: list[float]) -> int:
        if self._rng.random() < self.skill:
            return self._rng.choices(range(_VOCAB), distribution)[0]
        return self._rng.randrange(10 * _VOCAB)


def decode(
    policy: ShapePolicy, curves: CostCurves, texts: Iterable[Text], context: int = 128
) -> tuple[list[BeamShape], list[float], list[int]]:
    """Let the policy choose the shape of a step behind each of `texts`.

    Returns:
      the shapes, the seconds and the tokens of each step
    """
    shapes, seconds, tokens = [], [], []
    unread: list[Step] = []
    for text in texts:
        shape = policy.next_shape(context)
        step = text.step(shape)
        shapes.append(shape)
        seconds.append(curves.step(shape, context))
        tokens.append(len(step.path))
        unread.append(step)
        if len(unread) > _LATE:
            policy.learn(unread.pop(0))
    return shapes, seconds, tokens


def every_shape(widest: int = 4, longest: int = 8, most_rows: int = 32) -> list[BeamShape]:
    """Plain decoding and every width, length and capacity with room for a draft of each beam."""
    return [PLAIN] + [
        BeamShape(w, n, nodes)
        for w in range(1, widest + 1)
        for n in range(2, longest + 1)
        for nodes in range(max(n, w + 1), min(w * (n - 1) + 1, most_rows) + 1)
    ]
