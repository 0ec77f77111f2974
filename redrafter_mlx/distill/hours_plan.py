"""Sizes of a training run for a given time: of the corpus, the passes over it, the evaluations."""

from __future__ import annotations

from dataclasses import dataclass, replace

from redrafter_mlx.config import check_int, check_number
from redrafter_mlx.distill.estimate import Estimate
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.errors import BadInputError

PLANNED_EPOCHS = 4.0
"""Passes that the corpus is planned for; the remaining time may allow more or fewer."""

MIN_EPOCHS, MAX_EPOCHS = 0.25, 12.0

_EVALUATING, _TIMING = 0.06, 0.06
"""Maximum shares of the time for evaluations, and for timed questions."""

EVALUATIONS, QUESTIONS = (2, 10), (1, 8)
"""Minimum and maximum number of evaluations, and of timed questions."""

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
    evaluations: int = EVALUATIONS[1]
    timed_questions: int = QUESTIONS[1]
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
    tokens = min(int(room / (write + train)), int(trial.max_bytes / stored))
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
    most_questions: int = QUESTIONS[1],
) -> Plan:
    """Return the plan once the corpus is written: as many passes as the remaining time allows."""
    evaluations = _within(EVALUATIONS, _EVALUATING * plan.seconds / pace.evaluation)
    questions = _within(QUESTIONS, _TIMING * plan.seconds / pace.question)
    questions = min(questions, most_questions)
    beside = evaluations * pace.evaluation + questions * pace.question
    of_pass = pace.step * steps_of_pass
    passes = (plan.seconds - plan.spent - beside) / of_pass
    epochs = round(min(max(passes, MIN_EPOCHS), MAX_EPOCHS), 2)
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
