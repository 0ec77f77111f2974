"""Planning a training run for a given time: size of the corpus, passes over it, evaluations.

The corpus is planned from a short trial, and writing stops when its time is over, however fast it
was. Then real steps and a real evaluation are timed, and passes fill the remaining time. So a wrong
trial changes how much is trained on, but hardly when the run ends.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from redrafter_mlx.config import refuse_unknown_keys
from redrafter_mlx.distill.checked_arrays import digest_of
from redrafter_mlx.distill.corpus.shards import naming_damage
from redrafter_mlx.distill.estimate import Estimate
from redrafter_mlx.distill.hours_plan import (
    QUESTIONS,
    BlockSize,
    Pace,
    Plan,
    final_plan,
    first_plan,
)
from redrafter_mlx.distill.training.trainer import Evaluation, Event, Step
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.atomic_write import atomic_write
from redrafter_mlx.runtime.json_file import read_object

HOURS = "hours.json"

_SAVE_SECONDS = 60.0
"""Seconds between saves of the time spent, while a stage runs."""

_TRIAL = 0.05
"""Maximum share of the time for the trials before the corpus, and again for the one after it."""


class Schedule:
    """The plan of one run, kept in its folder, and its clock over all sessions."""

    def __init__(
        self, folder: Path, hours: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises BadInputError if a run of other hours has begun to train in the folder."""
        self._path, self._hours, self._clock = folder / HOURS, hours, clock
        self._began = self._saved = clock()
        self.plan: Plan | None = None
        self._events: Counter[type[Event]] = Counter()
        self._seconds: dict[type[Event], float] = {Step: 0.0, Evaluation: 0.0}
        self._last: float | None = None
        found = _read(self._path)
        if found is None or (found.hours != hours and not found.final):
            return
        if found.hours != hours:
            raise BadInputError(
                f"{folder} holds a run of {found.hours:g} hours, not {hours:g}; give another "
                f"--output, or the same hours to resume"
            )
        self.plan, self._began = found, clock() - found.spent

    @property
    def spent(self) -> float:
        """Seconds since the run began, without the breaks between sessions."""
        return self._clock() - self._began

    @property
    def trial_seconds(self) -> float:
        """Maximum seconds for the trials before the corpus, and again for the one after it."""
        return _TRIAL * self._hours * 3600

    def begin(self, trial: Estimate, blocks: BlockSize) -> Plan:
        """Plan a run that has no plan yet; errors as in `first_plan`."""
        self.plan = first_plan(self._hours, trial, blocks, self.spent)
        return self.plan

    def finalize(
        self,
        pace: Pace,
        answer_tokens: int,
        steps_of_pass: float,
        most_questions: int = QUESTIONS[1],
    ) -> Plan:
        """Plan the remaining time, once the corpus is written, for up to so many questions."""
        assert self.plan is not None
        now = replace(self.plan, spent=self.spent)
        self.plan = final_plan(now, pace, answer_tokens, steps_of_pass, most_questions)
        return self.plan

    def writing_is_over(self) -> bool:
        """Whether the time for the corpus is over."""
        return self.plan is not None and self.spent > self.plan.writing

    def is_over(self) -> bool:
        """Whether all the hours have passed."""
        return self.spent > self._hours * 3600

    def trained(self, event: Event | None = None) -> None:
        """Time an event of training; None starts the clock of the stage."""
        now = self._clock()
        if event is not None and self._last is not None:
            self._events[type(event)] += 1
            self._seconds[type(event)] += now - self._last
        self._last = now

    def _seconds_of(self, kind: type[Event]) -> float | None:
        """Return the mean seconds of the events of a kind; None before the first one."""
        return self._seconds[kind] / self._events[kind] if self._events[kind] else None

    def to_go(self, step: int = 0, steps: int = 0) -> float:
        """Return the expected seconds to the end of the run; `step` of `steps` are trained."""
        assert self.plan is not None
        plan = self.plan
        if not plan.final:
            return max(0.0, plan.seconds - self.spent)
        left = 1 - step / steps if steps else 1.0
        of_step = self._seconds_of(Step)
        training = left * plan.training if of_step is None else (steps - step) * of_step
        evaluation = self._seconds_of(Evaluation) or plan.evaluation
        return training + math.ceil(left * plan.evaluations) * evaluation + plan.timing

    def save_now_and_then(self) -> None:
        """Save, if the last time is a minute ago: a run may be killed."""
        if self._clock() - self._saved > _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the plan and the time spent."""
        self._saved = self._clock()
        assert self.plan is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._path) as partial:
            record = asdict(replace(self.plan, spent=round(self.spent, 1)))
            record |= {"sha256": digest_of(record)}
            partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _read(path: Path) -> Plan | None:
    if not path.exists():
        return None
    with naming_damage(path, "delete it"):
        record = read_object(path)
        written = record.pop("sha256", None)
        refuse_unknown_keys(record, list(Plan.__dataclass_fields__), "plan's key")
        plan = Plan(**record)  # type: ignore[arg-type]
        if digest_of(record) != written:
            raise ValueError("it has changed since it was written (SHA-256)")
        return plan
