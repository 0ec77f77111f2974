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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from redrafter_mlx.config import check_int, check_number, refuse_unknown_keys
from redrafter_mlx.distill.checked_arrays import digest_of
from redrafter_mlx.distill.corpus.shards import naming_damage
from redrafter_mlx.distill.estimate import Estimate
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.training.trainer import Evaluation, Event, Step
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.atomic_write import atomic_write
from redrafter_mlx.runtime.json_file import read_object

HOURS = "hours.json"

PLANNED_EPOCHS = 4.0
"""Passes that the corpus is planned for; the remaining time may allow more or fewer."""

_LEAST_EPOCHS, _MOST_EPOCHS = 0.25, 12.0

_EVALUATING, _TIMING = 0.06, 0.06
"""Maximum shares of the time for evaluations, and for timed questions."""

_EVALUATIONS, _QUESTIONS = (2, 10), (1, 8)
"""Minimum and maximum number of evaluations, and of timed questions."""

_SAVE_SECONDS = 60.0
"""Seconds between saves of the time spent, while a stage runs."""

_TRIAL = 0.05
"""Maximum share of the time for the trials before the corpus, and again for the one after it."""

_LEAST_ROWS = 6
"""Texts per block in the shortest runs."""

_ROUNDS = 4
"""Minimum number of blocks per process, so that the processes end near the planned time."""


@dataclass(frozen=True)
class BlockSize:
    """Limits on the blocks of a corpus; a short run needs smaller blocks.

    rows, least_rows: texts in the largest block, which long runs use, and in the smallest
    tokens:  maximum tokens of a text
    blocks:  minimum blocks of a corpus
    trained: minimum tokens for training
    workers: processes that write, one block each at a time
    """

    rows: int
    least_rows: int
    tokens: int
    blocks: int
    trained: int = 0
    workers: int = 1

    @classmethod
    def of(cls, job: TrainingJob, least_blocks: int, workers: int, *, fixed: bool) -> BlockSize:
        """Return the limits for a job; `fixed` keeps its own blocks, as given answers always do."""
        rows, openings = job.writing.batch, len(job.writing.openings)
        least = rows if fixed or job.data is not None else min(rows, max(_LEAST_ROWS, openings))
        blocks, trained = max(2, least_blocks + 1), 2 * job.training.batch
        return cls(rows, least, job.writing.max_answer_tokens, blocks, trained, workers)

    @property
    def least_tokens(self) -> int:
        """Tokens of the smallest corpus."""
        return max(self.trained, self.blocks * self.least_rows * self.tokens)

    def rows_for(self, tokens: int) -> int:
        """Return the texts per block in a corpus of `tokens`: halved until it has enough blocks."""
        rows, blocks = self.rows, max(self.blocks, _ROUNDS * self.workers)
        while rows > self.least_rows and blocks * rows * self.tokens > tokens:
            rows = max(self.least_rows, rows // 2)
        return rows


@dataclass(frozen=True)
class Pace:
    """Measured seconds of one optimiser step, one evaluation and one timed question."""

    step: float
    evaluation: float
    question: float


@dataclass(frozen=True)
class Plan:
    """What a run of `hours` does.

    writing: seconds from the start of the run after which no more corpus is written
    rows:    texts per block of the corpus; None keeps the job's number
    final:   whether the corpus is written, so that passes, evaluations and questions are final
    training, evaluation, timing: seconds of all steps, of one evaluation, and of the timing, once
             the plan is final
    spent:   seconds so far, over all sessions
    """

    hours: float
    answer_tokens: int
    writing: float
    rows: int | None = None
    epochs: float = PLANNED_EPOCHS
    evaluations: int = _EVALUATIONS[1]
    timed_questions: int = _QUESTIONS[1]
    final: bool = False
    training: float = 0.0
    evaluation: float = 0.0
    timing: float = 0.0
    spent: float = 0.0

    def __post_init__(self) -> None:
        """Raise BadInputError for a value of another type, or out of range."""
        check_number("hours", self.hours, low=0.0, low_excluded=True)
        for name in ("writing", "epochs", "training", "evaluation", "timing", "spent"):
            check_number(name, getattr(self, name), low=0.0)
        for name in ("answer_tokens", "evaluations", "timed_questions"):
            check_int(name, getattr(self, name), 0, None)
        if self.rows is not None:
            check_int("rows", self.rows, 1, None)
        if not isinstance(self.final, bool):
            raise BadInputError(f"final is {self.final!r:.80}; it must be true or false")

    @property
    def seconds(self) -> float:
        return self.hours * 3600

    def of(self, job: TrainingJob) -> TrainingJob:
        """Return the job with the planned sizes."""
        training = replace(job.training, epochs=self.epochs, evaluations=self.evaluations)
        writing = replace(job.writing, batch=self.rows or job.writing.batch)
        tokens, questions = self.answer_tokens, min(self.timed_questions, job.timed_questions)
        return replace(
            job, answer_tokens=tokens, timed_questions=questions, writing=writing, training=training
        )


def first_plan(hours: float, trial: Estimate, blocks: BlockSize, spent: float) -> Plan:
    """Plan a run from a trial of both stages, which was made for some size of corpus.

    Raises BadInputError, naming hours that are enough, if not even one pass over the smallest
    corpus fits.
    """
    least_tokens = blocks.least_tokens
    write = trial.writing_seconds / trial.answer_tokens
    train = trial.training_seconds / trial.answer_tokens  # of `PLANNED_EPOCHS` passes
    share = 1 - _EVALUATING - _TIMING
    room = share * hours * 3600 - spent
    stored = trial.corpus_bytes / trial.answer_tokens
    tokens = min(int(room / (write + train)), int(trial.most_bytes / stored))
    if tokens < least_tokens:
        tokens, least = least_tokens, least_tokens * (write + train / PLANNED_EPOCHS)
        if least > room:
            needed = (least + spent) / share / 3600
            raise BadInputError(
                f"--hours is {hours:g}, too short for {tokens} tokens of corpus and a pass over "
                f"them; give {needed * 1.1:.2g} at least"
            )
    rows = blocks.rows_for(tokens)
    return Plan(hours, tokens, writing=spent + tokens * write, rows=rows, spent=spent)


def final_plan(
    plan: Plan,
    pace: Pace,
    answer_tokens: int,
    steps_of_pass: float,
    most_questions: int = _QUESTIONS[1],
) -> Plan:
    """Return the plan once the corpus is written: as many passes as the remaining time allows."""
    evaluations = _within(_EVALUATIONS, _EVALUATING * plan.seconds / pace.evaluation)
    questions = _within(_QUESTIONS, _TIMING * plan.seconds / pace.question)
    questions = min(questions, most_questions)
    beside = evaluations * pace.evaluation + questions * pace.question
    of_pass = pace.step * steps_of_pass
    passes = (plan.seconds - plan.spent - beside) / of_pass
    epochs = round(min(max(passes, _LEAST_EPOCHS), _MOST_EPOCHS), 2)
    return replace(
        plan,
        answer_tokens=answer_tokens,
        epochs=epochs,
        evaluations=evaluations,
        timed_questions=questions,
        final=True,
        training=epochs * of_pass,
        evaluation=pace.evaluation,
        timing=questions * pace.question,
    )


def _within(bounds: tuple[int, int], number: float) -> int:
    return int(min(max(number, bounds[0]), bounds[1]))


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
        most_questions: int = _QUESTIONS[1],
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
