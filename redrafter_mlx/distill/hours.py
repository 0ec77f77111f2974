"""Training for a given time: the corpus is written for a share of it, and the rest is trained.

Nothing is planned from trials: whatever the machine is busy with, the run ends in time. Only how
much is written and trained depends on its speed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from redrafter_mlx.checks import check_int, check_number, refuse_unknown_keys
from redrafter_mlx.distill.checked_arrays import digest_of
from redrafter_mlx.distill.corpus.shards import naming_damage
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.training.checkpoint import CHECKPOINT
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files.atomic_write import atomic_write
from redrafter_mlx.runtime.files.json_file import read_object

HOURS = "hours.json"

MAX_EPOCHS = 12.0
"""Training ends after so many passes, even if there is time for more: they would not help."""

_WRITING = 0.4
"""Share of the time after which no more corpus is written. Where SmolLM2 trains its own drafter,
the rest is enough for some four passes."""

_TIMING, _MAX_TIMING = 0.1, 600.0
"""Share of the time, and seconds at most, for the last evaluation and the timed questions."""

_EVALUATIONS, _MIN_EVALUATIONS, _MAX_EVALUATIONS = 5, 2, 10
"""Evaluations in an hour of the run, and their limits."""

_ROWS, _MIN_ROWS = 63, 6
"""Texts per block in a run of an hour, and at least: a short run on a slow machine needs small
blocks, as only whole ones are kept. The job's own number is the limit."""

_SAVE_SECONDS = 60.0  # seconds between saves of the time spent, while a stage runs

_UNLIMITED = 10**12


@dataclass(frozen=True)
class _Record:
    """What is kept of a run for a time."""

    hours: float
    spent: float = 0.0  # seconds so far, over all sessions
    answer_tokens: int | None = None  # of the corpus; None while it is written
    trained_from: float = 0.0  # seconds after which training began

    def __post_init__(self) -> None:
        check_number("hours", self.hours, low=0.0, low_excluded=True)
        for name in ("spent", "trained_from"):
            check_number(name, getattr(self, name), low=0.0)
        if self.answer_tokens is not None:
            check_int("answer_tokens", self.answer_tokens, 0, None)


class Deadline:
    """The time of one run, kept in its folder, and its clock over all sessions."""

    def __init__(
        self, folder: Path, hours: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises BadInputError if a run of other hours, or of none, has trained in the folder."""
        self._path, self._clock = folder / HOURS, clock
        found = _read(self._path)
        if found is None and (folder / CHECKPOINT).exists():
            raise BadInputError(
                f"{folder} holds a run without --hours; give another --output, or leave out "
                f"--hours to resume it"
            )
        if found is not None and found.hours != hours and found.answer_tokens is not None:
            raise BadInputError(
                f"{folder} holds a run of {found.hours:g} hours, not {hours:g}; give another "
                f"--output, or the same hours to resume"
            )
        same = found is not None and found.hours == hours
        self._record = found if found is not None and same else _Record(hours)
        self._began = clock() - self._record.spent
        self._saved = clock()

    @property
    def seconds(self) -> float:
        """The whole time of the run."""
        return self._record.hours * 3600

    @property
    def spent(self) -> float:
        """Seconds since the run began, without the breaks between sessions."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Seconds to the end of the run."""
        return max(0.0, self.seconds - self.spent)

    @property
    def training_ends(self) -> float:
        """Seconds from the start of the run after which no more steps are trained."""
        return self.seconds - min(_TIMING * self.seconds, _MAX_TIMING)

    def of(self, job: TrainingJob, *, fixed: bool = False) -> TrainingJob:
        """Return the job with sizes that time decides; `fixed` keeps its texts a block."""
        hours, rows = self._record.hours, job.writing.batch
        if not fixed and job.data is None:
            min_rows = max(_MIN_ROWS, len(job.writing.openings))
            rows = min(rows, max(min_rows, round(_ROWS * hours)))
        evaluations = min(max(round(_EVALUATIONS * hours), _MIN_EVALUATIONS), _MAX_EVALUATIONS)
        return replace(
            job,
            answer_tokens=self._record.answer_tokens or _UNLIMITED,
            writing=replace(job.writing, batch=rows),
            training=replace(job.training, epochs=MAX_EPOCHS, evaluations=evaluations),
        )

    def writing_is_over(self) -> bool:
        return self.spent > _WRITING * self.seconds

    def begin_training(self, answer_tokens: int) -> None:
        """Keep the size of the corpus; BadInputError, naming hours, if little time is left."""
        if self._record.answer_tokens is not None:
            return
        spent = self.spent
        if spent > (1 + _WRITING) / 2 * self.training_ends:
            hours, took = self._record.hours, spent / 3600
            raise BadInputError(
                f"--hours is {hours:g}, and the smallest corpus took {took:.2g}; give "
                f"{took / _WRITING * 1.1:.2g} at least"
            )
        self._record = replace(
            self._record, answer_tokens=answer_tokens, trained_from=round(spent, 1)
        )
        self.save()

    def trained(self) -> float:
        """Return the share of the time for training that has passed, 1 at most."""
        began = self._record.trained_from
        return min(1.0, (self.spent - began) / max(self.training_ends - began, 1e-9))

    def is_over(self) -> bool:
        return self.left == 0.0

    def save_now_and_then(self) -> None:
        """Save, if the last time is a minute ago: a run may be killed."""
        if self._clock() - self._saved > _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        self._saved = self._clock()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._path) as partial:
            record = asdict(replace(self._record, spent=round(self.spent, 1)))
            record |= {"sha256": digest_of(record)}
            partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _read(path: Path) -> _Record | None:
    if not path.exists():
        return None
    with naming_damage(path, "delete it"):
        record = read_object(path)
        written = record.pop("sha256", None)
        refuse_unknown_keys(record, list(_Record.__dataclass_fields__), "run's key")
        found = _Record(**record)  # type: ignore[arg-type]
        if digest_of(record) != written:
            raise ValueError("it has changed since it was written (SHA-256)")
        return found
