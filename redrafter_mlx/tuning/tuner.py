"""Auto-tuning state shared by all generations: cost model and acceptance statistics."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.nn as nn
import numpy as np

from redrafter_mlx.config import AcceptMethod, BeamShape
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.runtime.device import backend
from redrafter_mlx.target_model.fingerprint import values_hash
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.acceptance import AcceptanceStatistics
from redrafter_mlx.tuning.batch_policy import BatchPolicy
from redrafter_mlx.tuning.candidates import LENGTHS, WIDEST, candidates
from redrafter_mlx.tuning.cost_model import (
    BATCH_LENGTHS,
    BATCHES,
    LEVEL_COST,
    CostModel,
    cost_model,
)
from redrafter_mlx.tuning.learned import Learned, learned_file, save_learned, saved_learned
from redrafter_mlx.tuning.probe_budget import ProbeBudget
from redrafter_mlx.tuning.profiler import Profiler
from redrafter_mlx.tuning.step_times import StepTimes
from redrafter_mlx.tuning.timings import SHORT_CONTEXT, Timings, saved_timings, setup_of

_COPIES_ALONE = BeamShape(1, 8)
"""Shape of copies without a drafter. Eight query rows stay within every Metal kernel for few rows,
as long as no heads share keys."""


class Tuner:
    """Chooses beam shapes for one model and drafter.

    No answer waits for a measurement. Answers begin with costs that are assumed for this kind of
    machine; small measurements after answers replace them one by one, and `measure` replaces all.

    setup:  the setup that the costs hold for
    costs:  the cost model that shapes are chosen by; measured as far as measurements exist
    widest: maximum width that is chosen automatically, 0 without a drafter
    kept:   whether all costs are on the disk
    """

    def __init__(self, model: nn.Module, target: Target, drafter: Drafter | None) -> None:
        """Without a drafter, only copies are drafted, on the host."""
        self._target = target
        key = "lookup" if drafter is None else drafter.timing_key
        self.setup = setup_of(model, target, key or "one of its own")
        self.widest, self._longest, self._level_cost = 0, LENGTHS[-1], LEVEL_COST
        self._limit = LENGTHS[-1]
        if drafter is not None:
            self._limit = min(self._limit, drafter.max_length or self._limit)
            self.widest = min(WIDEST, drafter.max_width or WIDEST)
            self._longest = drafter.trained_length or self._longest
            self._level_cost = drafter.level_cost
        timings, self._learned = Timings(self.setup), Learned()
        self._learned_file: Path | None = None
        if key is not None:
            timings, modules = saved_timings(self.setup), drafter.modules if drafter else ()
            self._learned_file = learned_file(self.setup, values_hash(model, *modules))
            self._learned = saved_learned(self._learned_file, timings.key)
        self.kept = timings.complete
        self._profiler = Profiler(target, drafter, timings, self.widest)
        # What answers saved while costs were assumed; a measured profile has its own budget.
        self._budget = ProbeBudget() if timings.complete else ProbeBudget(self._learned.saved)
        self._budget_renewed = False
        self._in_seconds = _has_unit(timings)  # or in units of a one-row call that is not measured
        self.costs = self._cost_model(timings)
        self._use_timings()
        self._lent: dict[BatchPolicy, AcceptMethod] = {}  # until they are recorded
        self._lock, self._measuring = threading.Lock(), threading.Lock()

    @property
    def stores(self) -> bool:
        """Whether costs are kept on the disk; those of a drafter of unknown code are not."""
        return self._learned_file is not None

    @property
    def measured(self) -> bool:
        """Whether all costs have been measured together, by `measure` now or earlier."""
        return self._profiler.timings.complete

    def measured_for(self, batch: int) -> bool:
        """Whether all costs are measured, those of batches of `batch` rows included."""
        self._expect_batches(batch)
        return self._profiler.timings.complete and self._profiler.finished

    def measure(self, done: Callable[[float], None] | None = None, batch: int = 1) -> None:
        """Measure all costs now, which takes some seconds, and save them.

        Threads as in `load`.

        Args:
          done: called now and then with the finished share
          batch: measure the costs of batches of this many rows, too
        """
        self._target.lock.check()  # before it waits for another measurement
        with self._measuring:  # and without the lock: answers may begin meanwhile
            self._profiler.batch = max(self._profiler.batch, batch)
            self._profiler.measure_all(done)
            with self._lock:
                self._use_timings()
                # Corrections of equal costs go, too: all was measured anew.
                self._learned.times = StepTimes()
            self.kept = self.stores and self._profiler.timings.save()

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
        if not self.widest:
            W, L = width or _COPIES_ALONE.width, length or _COPIES_ALONE.length
            return BeamShape(W, L, max_nodes)
        widths = (width,) if width else range(1, self.widest + 1)
        lengths = (length,) if length else [n for n in LENGTHS if n <= self._longest]
        shapes = [BeamShape(w, n, max_nodes) for w in widths for n in lengths]
        costs, acceptance = self._cost_model(Timings(self.setup)), AcceptanceStatistics(shapes)
        if by_clock:
            costs = self.costs
            acceptance = self._learned.acceptance.get(method, acceptance).continued(shapes)
        seconds = np.array([costs.step(s, context) for s in acceptance.shapes])
        return shapes[int(np.argmax(acceptance.tokens() / seconds))] if len(seconds) else shapes[0]

    def policy(self, method: AcceptMethod) -> BatchPolicy:
        """Return the policy of a new batch, with what earlier ones learned by this method."""
        with self._lock:
            # Batches that run at once share it: the last one would overwrite what others learned.
            running = [lent.acceptance for lent, of in self._lent.items() if of == method]
            earlier = self._learned.acceptance.get(method, self.statistics())
            known = running[0] if running else earlier.continued(self._candidates)
            biased_alone = known.biased is not None and not known.steps().any()
            if biased_alone and not self._budget_renewed:  # what was spent taught nothing here
                self._budget, self._budget_renewed = ProbeBudget(), True
            policy = BatchPolicy(self.costs, known, self._learned.times, self._budget)
            policy.begin_answer()
            self._lent[policy] = method
            return policy

    def statistics(self) -> AcceptanceStatistics:
        """Return acceptance statistics of the candidate shapes, with nothing learned."""
        return AcceptanceStatistics(self._candidates)

    def record(self, policy: BatchPolicy) -> None:
        """Record what a batch has learned, when its policy is no longer used."""
        with self._lock:
            self._learned.acceptance[self._lent.pop(policy)] = policy.acceptance
            self._expect_batches(policy.most_rows)
            self._learned.saved = self._budget.seconds
            if not self._lent and self._learned_file is not None:
                save_learned(self._learned_file, self._learned, self._profiler.timings.key)

    def abandon(self) -> None:
        """Forget what all batches have learned, when their policies are no longer used."""
        with self._lock:
            self._lent.clear()

    def measure_a_little(self, seconds: float, steps: int) -> None:
        """Measure as much as a batch's time allows, unless another batch is decoded now.

        Args:
          seconds: total seconds of its steps
          steps: number of steps after the prompts
        """
        with self._lock:
            wanted = not self._lent and not self._profiler.finished
        # Outside the lock, so that no other answer waits for the measurement.
        if wanted and steps and self._measuring.acquire(blocking=False):
            try:
                before = self._profiler.timings.key
                self._profiler.after_answer(seconds, seconds / steps)
                self._save()  # the budget too; what other processes have measured is added
                if self._profiler.timings.key != before:
                    self._use_timings()
            finally:
                self._measuring.release()

    def _expect_batches(self, rows: int) -> None:
        """Measure batches of up to `rows` rows from now on, and choose shapes for them."""
        if rows > self._profiler.batch:
            self._profiler.batch = rows
            self._find_candidates()

    def _use_timings(self) -> None:
        """Choose by the measured times from now on, and forget corrections of what has changed."""
        self.costs, old = self._cost_model(self._profiler.timings), self.costs
        self._learned.times.keep(partial(_same, old, self.costs))
        in_seconds = _has_unit(self._profiler.timings)
        if in_seconds != self._in_seconds:
            self._budget, self._in_seconds = ProbeBudget(), in_seconds
        self._find_candidates()

    def _find_candidates(self) -> None:
        batches = (1,) if self._profiler.batch == 1 else (1, BATCHES[-1])
        self._candidates = candidates(self.costs, self.widest, self._limit, batches)

    def _cost_model(self, timings: Timings) -> CostModel:
        return cost_model(timings, backend(), self.widest, self._level_cost)

    def _save(self) -> None:
        if self.stores:
            self._profiler.timings.add_to_saved()


def _has_unit(timings: Timings) -> bool:
    """Whether a one-row call is measured, which is the unit of all assumed costs."""
    return ("call", 1, SHORT_CONTEXT) in timings.seconds


def _same(old: CostModel, new: CostModel, batch: int, rows: int) -> bool:
    """Whether both models predict the same for steps with `rows` query rows for each batch row."""
    shapes = [(w, n) for w in range(1, WIDEST + 1) for n in BATCH_LENGTHS if rows > 1]
    return old.verify(rows, SHORT_CONTEXT, batch) == new.verify(rows, SHORT_CONTEXT, batch) and all(
        old.drafting(w, n, batch) == new.drafting(w, n, batch) for w, n in shapes
    )
