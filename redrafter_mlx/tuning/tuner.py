"""Auto-tuning state shared by all generations: cost model and acceptance statistics."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from weakref import WeakSet

import mlx.nn as nn
import numpy as np

from redrafter_mlx.config import PLAIN, AcceptMethod, BeamShape
from redrafter_mlx.drafting.interface import LEVEL_COST, Drafter
from redrafter_mlx.errors import BusyError
from redrafter_mlx.runtime.device import backend
from redrafter_mlx.target_model.fingerprint import values_hash
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.acceptance import AcceptanceStatistics
from redrafter_mlx.tuning.corrections import Corrections
from redrafter_mlx.tuning.cost import (
    LENGTHS,
    WIDEST,
    CostModel,
    assumed_costs,
    candidates,
    setup_of,
)
from redrafter_mlx.tuning.policy import TunedPolicy
from redrafter_mlx.tuning.profile import MAX_SPREAD, Profiler
from redrafter_mlx.tuning.store import Record, record_file, save_record, saved_record

_TRIED = 7
"""Steps of each shape in a trial: up to four of them cannot be timed, as graphs and shapes change
(test_a_first_answer_gains_three_quarters_of_what_later_ones_gain)."""


class Tuner:
    """Chooses beam shapes for one model and drafter.

    No answer waits for a measurement. Costs are assumed for this kind of machine, or were measured
    by `measure`. The first steps of the first text, that of warming up, are a trial: plain ones and
    trees of two sizes. What they take corrects the costs, and so does what all later steps take: a
    step takes more than its calls, or less where the host works ahead.

    setup:  the setup that the costs hold for
    file:   where they are kept, with what answers have taught
    costs:  the cost model that shapes are chosen by
    widest: maximum width that is chosen automatically, 0 without a drafter
    kept:   whether measured costs are on the disk
    trial:  shapes of the steps that the next text begins with; none once it is known what drafted
            steps of one sequence take, and what they gain
    stores: whether anything is kept; not that of a drafter of unknown code
    """

    def __init__(self, model: nn.Module, target: Target, drafter: Drafter | None) -> None:
        """Without a drafter, all drafts come from the host."""
        self._target = target
        key = "lookup" if drafter is None else drafter.timing_key
        self.stores = key is not None
        self.setup = setup_of(model, target, key or "one of its own")
        self.file = record_file(self.setup)
        self.widest, self._longest, cost = 0, LENGTHS[-1], (LEVEL_COST, 0.0)
        self._limit = LENGTHS[-1]
        if drafter is not None:
            self._limit = min(self._limit, drafter.max_length or self._limit)
            self.widest = min(WIDEST, drafter.max_width or WIDEST)
            self._longest = drafter.trained_length or self._longest
            cost = drafter.level_cost, drafter.block_cost
        self._assumed = assumed_costs(self.setup, backend(), self.widest, *cost)
        self._values, self._record = "", Record()
        if self.stores:
            self._values = values_hash(model, *(drafter.modules if drafter else ()))
            self._record = saved_record(self.setup, self._values)
        self.kept = self.measured
        self._profiler = Profiler(target, drafter, self.widest)
        self._running: WeakSet[TunedPolicy] = WeakSet()
        self._lock, self.measuring = threading.Lock(), threading.Lock()
        known = len(self._record.corrections.of(1).factors) > 1 and self._record.acceptance
        self.trial = () if known else trial_shapes(self.widest, self._limit)
        self._use_costs()

    @property
    def measured(self) -> bool:
        """Whether costs have been measured, now or earlier."""
        return self._record.costs is not None

    def measure(self, done: Callable[[float], None] | None = None) -> None:
        """Measure all costs now, which takes some seconds; use and save them.

        The next text begins with a trial. Threads as in `load`.

        Args:
          done: called now and then with the finished share
        Raises:
          BusyError: the machine is too busy to be measured; nothing is used or saved
        """
        self._target.lock.check()  # before it waits for another measurement
        with self.measuring:  # and without the lock: answers may begin meanwhile
            costs = self._profiler.measure(self.setup, done)
            _check_spread(costs)
            with self._lock:
                self._record.costs, self._record.corrections = costs, Corrections()
                self._use_costs()
                self.trial = trial_shapes(self.widest, self._limit)
                self.kept = self._save(measured=True)

    def sampled_costs(self) -> CostModel:
        """Time a few calls and return what they cost; nothing is used or saved.

        Raises BusyError as `measure`.
        """
        self._target.lock.check()
        with self.measuring:
            costs = self._profiler.sample(self.setup)
        _check_spread(costs)
        return costs

    def best_shape(
        self,
        width: int | None = None,
        length: int | None = None,
        max_nodes: int | None = None,
        *,
        context: int = 0,
        by_clock: bool = True,
        method: AcceptMethod = "greedy",
    ) -> BeamShape:
        """Return the most promising shape among those with the requested width, length and nodes.

        Without `by_clock` the choice uses what is assumed for this kind of machine, and neither
        measured times nor acceptance statistics: the same shape in every run.
        """
        if not self.widest or length == 1:  # of copies alone, or plain
            return BeamShape(width or 1, length or LENGTHS[-1], max_nodes)
        widths = (width,) if width else range(1, self.widest + 1)
        lengths = (length,) if length else [n for n in LENGTHS if n <= self._longest]
        shapes = [BeamShape(w, n, max_nodes) for w in widths for n in lengths]
        known = self._record.acceptance.get(method) if by_clock else None
        known = known.continued(shapes) if known else AcceptanceStatistics(shapes)
        costs = self.costs if by_clock else self._assumed
        return shapes[int(np.argmax(known.tokens() / costs.steps(shapes, context, 1)))]

    def policy(self, method: AcceptMethod) -> TunedPolicy:
        """Return the policy of a new batch, with what earlier ones learned by this method.

        Batches that run at once share it: the last one would overwrite what others learned.
        """
        with self._lock:
            known = self._record.acceptance.get(method) or self._first_statistics()
            if known.shapes != self._candidates:
                known = known.continued(self._candidates)
            self._record.acceptance[method] = known
            trial, self.trial = self.trial, ()
            policy = TunedPolicy(self.costs, known, self._record.corrections, trial)
            policy.begin_answer()
            self._running.add(policy)
            return policy

    def expected_rates(
        self, acceptance: AcceptanceStatistics, length: int
    ) -> dict[BeamShape, tuple[float, float]]:
        """Return each shape's expected tokens per step and per second, after `length` tokens."""
        policy = TunedPolicy(self.costs, acceptance, self._record.corrections)
        return policy.expected_rates(length)

    def statistics(self) -> AcceptanceStatistics:
        """Return acceptance statistics of the candidate shapes, with nothing learned."""
        return AcceptanceStatistics(self._candidates)

    def record(self, policy: TunedPolicy) -> None:
        """Save what batches have learned, when this policy was the last one in use."""
        with self._lock:
            self._running.discard(policy)
            if not self._running:
                self._save()

    def _first_statistics(self) -> AcceptanceStatistics:
        """Return what is known of another method's acceptance, for one that was not used yet."""
        for known in self._record.acceptance.values():
            return deepcopy(known)
        return self.statistics()

    def _use_costs(self) -> None:
        """Choose by the measured costs from now on, or by assumed ones if there are none."""
        self.costs = self._record.costs or self._assumed
        self._candidates = candidates(self.costs, self.widest, self._limit, batches=(1, 8))

    def _save(self, *, measured: bool = False) -> bool:
        return self.stores and save_record(
            self.setup, self._record, self._values, measured=measured
        )


def trial_shapes(widest: int, longest: int = LENGTHS[-1]) -> tuple[BeamShape, ...]:
    """Return the shapes of a trial's steps, up to a width and a length; none without a drafter.

    The first is a drafted one, so that the drafter reads the prompt, and its memory is known.
    """
    if not widest:
        return ()
    larger = BeamShape(min(2, widest), min(4, longest))
    return tuple([shape for shape in (BeamShape(1, 2), PLAIN, larger) for _ in range(_TRIED)])


def _check_spread(costs: CostModel) -> None:
    if costs.spread > MAX_SPREAD:
        raise BusyError(
            f"the machine is too busy to be measured: times of the same call differ by "
            f"{costs.spread:.0%}; nothing is kept",
            remedy="measure again when it is quiet",
        )
