"""What a model's answers know together: what steps cost on this machine, and how drafts fare."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import mlx.nn as nn

from redrafter_mlx.config import PLAIN, AcceptMethod, BeamShape, SamplingParams
from redrafter_mlx.costs import CostCurves, Setup, saved_curves
from redrafter_mlx.decode import Decoder, PlainRows, one_row
from redrafter_mlx.drafter import Drafter
from redrafter_mlx.measure import measure, setup_of
from redrafter_mlx.odds import Odds
from redrafter_mlx.proposer import Proposer
from redrafter_mlx.report import StepResult
from redrafter_mlx.sampling import sequence_keys
from redrafter_mlx.shape import WIDEST, ShapePolicy, candidates
from redrafter_mlx.target import Target

_LISTEN_LENGTH = 5
"""Of the trees that tell how drafts fare; what lies deeper is carried on from there."""


class Tuning:
    """Cost curves, measured when they are first needed, and the odds at the end of each answer.

    setup: what the curves hold for
    """

    def __init__(
        self,
        model: nn.Module,
        target: Target,
        proposer: Proposer,
        drafter: Drafter | None,
        kind: str,
    ) -> None:
        """`drafter` holds the proposer's tensors, if it has any; `kind` tells proposers apart."""
        self.setup: Setup = setup_of(model, target, drafter, kind)
        self._target = target
        self._proposer = proposer
        self._widest = WIDEST
        if drafter is not None:
            self._widest = min(WIDEST, drafter.config.output_size)
        self._curves: CostCurves | None = None
        self._odds: dict[AcceptMethod, Odds] = {}
        self._lock = threading.Lock()

    @property
    def known(self) -> bool:
        """Whether curves are at hand, so that nothing needs to be measured.

        Those that a busy machine gave an earlier process are not, until they are settled.
        """
        if self._curves is None:
            saved = saved_curves(self.setup)
            self._curves = saved if saved is not None and saved.settled else None
        return self._curves is not None

    def curves(
        self, *, again: bool = False, done: Callable[[float], None] | None = None
    ) -> CostCurves:
        """The curves of this machine, measured in seconds if they are not known, or `again`.

        `done` is told the share of it that is finished, now and then.
        """
        with self._lock:
            if again or not self.known:
                fresh = measure(
                    self._target, self._proposer, self.setup, widest=self._widest, done=done
                )
                noisy = None if again else saved_curves(self.setup)
                self._curves = fresh if noisy is None else noisy.or_quieter(fresh)
                self._curves.save()
                self._odds.clear()
            assert self._curves is not None
            return self._curves

    @property
    def plain_rows(self) -> PlainRows:
        """Of the curves, where they are known; see CostCurves."""
        return self._curves.plain_rows if self.known and self._curves is not None else one_row

    def policy(self, method: AcceptMethod) -> ShapePolicy:
        """The policy of a new answer; it begins with what earlier ones by this method learned."""
        curves = self.curves()
        known = self._odds.get(method)
        odds = Odds(candidates(curves, self._widest)) if known is None else known.calmed()
        return ShapePolicy(curves, odds)

    def listen(
        self, prompts: Sequence[list[int]], max_tokens: int, done: Callable[[float], None]
    ) -> ShapePolicy:
        """A policy that knows how drafts fare in answers to `prompts`, verified as large trees."""
        curves = self.curves()
        odds = Odds(candidates(curves, self._widest))
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

    def keep(self, method: AcceptMethod, policy: ShapePolicy) -> None:
        """Remember what an answer has learned."""
        self._odds[method] = policy.odds
