"""What a model's answers share: what steps cost on this machine, and how drafts are accepted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import mlx.nn as nn

from redrafter_mlx.autotune.acceptance import Odds
from redrafter_mlx.autotune.assumed import assumed_curves
from redrafter_mlx.autotune.cost_model import CostCurves, Setup, saved_curves
from redrafter_mlx.autotune.policy import LENGTHS, WIDEST, ShapePolicy, candidates
from redrafter_mlx.autotune.profiler import measure, setup_of
from redrafter_mlx.autotune.slices import SlicedMeasurement
from redrafter_mlx.config import PLAIN, AcceptMethod, BeamShape, SamplingParams
from redrafter_mlx.decoding.loop import Decoder
from redrafter_mlx.decoding.step_result import StepResult
from redrafter_mlx.drafting.interface import Proposer
from redrafter_mlx.drafting.recurrent import Drafter
from redrafter_mlx.runtime.device import backend
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target.model import Target

_LISTEN_LENGTH = 5
"""Of the trees that tell how drafts fare; what lies deeper is carried on from there."""

_COPIES_ALONE = BeamShape(1, 8)
"""Eight rows stay with every Metal kernel for few rows, as long as no heads share keys."""


class Tuning:
    """Cost curves, and the odds of acceptance at the end of each answer.

    Nobody waits for a measurement. Answers begin with curves that are assumed for such a machine;
    small measurements after answers replace them bit by bit, and `measure` replaces them at once.

    setup: what the curves hold for
    """

    def __init__(
        self,
        model: nn.Module,
        target: Target,
        proposer: Proposer | None,
        drafter: Drafter | None,
        kind: str | None,
    ) -> None:
        """`drafter` holds the proposer's tensors, if it has any.

        Proposers of one `kind` with equal tensors take equal times; None is like no other one, and
        nothing is kept on disk.
        """
        self.setup: Setup = setup_of(model, target, drafter, kind or "one of its own")
        self._target = target
        self._proposer = proposer
        self._on_disk = kind is not None
        self._widest = WIDEST
        self._longest = LENGTHS[-1]
        if drafter is not None:
            self._widest = min(WIDEST, drafter.config.output_size)
            self._longest = (drafter.config.draft_length or self._longest) + 1
        self._slices = SlicedMeasurement(
            target, proposer, self.setup, self._widest, on_disk=self._on_disk
        )
        self._measured = saved_curves(self.setup) if self._on_disk else None
        self._odds: dict[AcceptMethod, Odds] = {}
        self._answering = 0
        self._lock = threading.Lock()
        self._measuring = threading.Lock()

    @property
    def measured(self) -> bool:
        """Whether all of the curves have been measured, by `measure` now or earlier."""
        return self._measured is not None

    def curves(self) -> CostCurves:
        """The curves to choose shapes by: measured, so far as that was done."""
        return self._measured or self._slices.curves()

    def measure(self, done: Callable[[float], None] | None = None) -> CostCurves:
        """Measure everything now, which takes some seconds, and keep it.

        `done` is told the share of it that is finished, now and then.
        """
        with self._lock:
            self._measured = measure(
                self._target, self._proposer, self.setup, widest=self._widest, done=done
            )
            if self._on_disk:
                self._measured.save()
            self._odds.clear()
            return self._measured

    def fill(
        self,
        width: int | None = None,
        length: int | None = None,
        max_nodes: int | None = None,
        *,
        context: int = 0,
        by_clock: bool = True,
    ) -> BeamShape:
        """The shape that promises most among those that have what was asked for.

        Without `by_clock` neither measured times nor acceptance decide, but what is assumed of
        such a machine: the same shape in every run.
        """
        if self._proposer is None:
            W, L = width or _COPIES_ALONE.width, length or _COPIES_ALONE.length
            return BeamShape(W, L, max_nodes)
        widths = (width,) if width else range(1, self._widest + 1)
        lengths = (length,) if length else [n for n in LENGTHS if n <= self._longest]
        shapes = [BeamShape(w, n, max_nodes) for w in widths for n in lengths]
        curves, odds = assumed_curves(self.setup, backend(), {}, self._widest), Odds(shapes)
        if by_clock:
            curves, known = self.curves(), next(iter(self._odds.values()), odds)
            odds = known.calmed(shapes)
        tokens = odds.tokens()
        return max(shapes, key=lambda s: tokens.get(s, 1.0) / curves.step(s, context))

    def policy(self, method: AcceptMethod) -> ShapePolicy:
        """The policy of a new answer; it begins with what earlier ones by this method learned."""
        with self._lock:
            curves, known = self.curves(), self._odds.get(method)
            self._answering += 1
        shapes = candidates(curves, self._widest) if self._proposer else ()
        return ShapePolicy(curves, Odds(shapes) if known is None else known.calmed(shapes))

    def listen(
        self, prompts: Sequence[list[int]], max_tokens: int, done: Callable[[float], None]
    ) -> ShapePolicy:
        """A policy that knows how drafts fare in answers to `prompts`, verified as large trees."""
        curves = self.curves()
        odds = Odds(candidates(curves, self._widest) if self._proposer else ())
        wide = BeamShape(self._widest, _LISTEN_LENGTH)
        decoder = Decoder(self._target, self._proposer, wide, SamplingParams())
        for i, prompt in enumerate(prompts):
            said = 0

            def finished(result: StepResult) -> bool:
                nonlocal said
                said += len(result.tokens)
                return said >= max_tokens

            results = decoder.run(self._target.new_cache(), 0, prompt, sequence_keys(0), finished)
            for result in results:
                if result.shape != PLAIN:
                    odds.learn(result)
            done((i + 1) / len(prompts))
        return ShapePolicy(curves, odds)

    def keep(self, method: AcceptMethod, policy: ShapePolicy, seconds: float, steps: int) -> None:
        """Remember what an answer has learned, and measure what its time allows for."""
        with self._lock:
            self._odds[method] = policy.odds
            self._answering -= 1
            idle = self._answering == 0 and not self.measured
        if idle and steps > 0 and self._measuring.acquire(blocking=False):
            try:
                self._slices.earn(seconds, seconds / steps)
            finally:
                self._measuring.release()
