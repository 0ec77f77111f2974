"""The answers file: one line of JSON per question, method and repeat, also in batches.

It has the fields of Spec-Bench's answer files, so Spec-Bench's tools can read it, and in addition
the token ids and everything that a summary is computed from. An interrupted run resumes where its
file ends.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from redrafter_mlx.bench.measure.methods import Method
from redrafter_mlx.bench.measure.runner import Run
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files.atomic_write import locked, name_in_errors

Settings = dict[str, object]
"""Settings that answers must share to be summarised together, by name; `settings_of` lists them."""


class AnswerKey(NamedTuple):
    """Identity of an answer, see `Answer`; one with the same key replaces it."""

    dtype: str
    method: Method
    prompt_tokens: int | None
    group: tuple[int | str, ...]
    question_id: int | str
    repeat: int


@dataclass(frozen=True)
class Answer:
    """One run of one method on one question."""

    question_id: int | str
    category: str
    dtype: str  # as given by the user, such as `float16` or `4bit`
    method: Method
    repeat: int  # counted from 0
    prompt_ids: list[int]
    run: Run
    tstamp: float  # end of the run, in seconds since 1970
    # ids of the questions that were answered at once, this one among them
    group: tuple[int | str, ...]
    # length that the prompt was brought to; None if it was left unchanged
    prompt_tokens: int | None = None
    # whether the tokens equal those of mlx-lm's loop for this prompt; None if the answer was not in
    # a batch, or not greedy
    as_alone: bool | None = None

    @property
    def key(self) -> AnswerKey:
        return AnswerKey(
            self.dtype, self.method, self.prompt_tokens, self.group, self.question_id, self.repeat
        )

    @property
    def round(self) -> tuple[object, ...]:
        """What the answers that methods are compared by have in common."""
        return self.dtype, self.prompt_tokens, self.method.batch_size, self.group, self.repeat

    def to_dict(self, settings: Settings) -> dict[str, object]:
        answer = asdict(self)
        run = answer.pop("run")
        lengths = run.pop("accept_lengths")
        choice = {
            "index": 0,
            "turns": [run.pop("text")],
            "decoding_steps": [len(lengths)],
            "new_tokens": [len(run["token_ids"])],
            "wall_time": [run["first_token_seconds"] + run["decode_seconds"]],
            "accept_lengths": lengths,
        }
        spec_bench = {
            "answer_id": uuid.uuid4().hex,
            "model_id": f"{settings['model']} {self.dtype} {self.method.name}",
            "choices": [choice],
        }
        return {**answer, **spec_bench, **run, "settings": settings}

    @classmethod
    def from_dict(cls, line: dict[str, Any]) -> Answer:
        """Parse a line; raises KeyError, TypeError, ValueError or IndexError if it is invalid."""
        choice = line["choices"][0]
        integers = ("token_ids", "accepted", "nodes", "query_rows")
        numbers = ("first_token_seconds", "decode_seconds", "peak_memory")
        measured: dict[str, Any] = {name: _integers(line[name]) for name in integers}
        measured |= {name: _number(line[name]) for name in numbers}
        run = Run(
            text=choice["turns"][0],
            accept_lengths=_integers(choice["accept_lengths"]),
            shapes=[_integers(shape) for shape in line["shapes"]],
            timed_tokens=int(line["timed_tokens"]),
            out_of_memory=bool(line["out_of_memory"]),
            **measured,
        )
        return cls(
            question_id=line["question_id"],
            category=str(line["category"]),
            dtype=str(line["dtype"]),
            method=Method(**line["method"]),
            repeat=int(line["repeat"]),
            prompt_ids=_integers(line["prompt_ids"]),
            run=run,
            tstamp=_number(line["tstamp"]),
            group=tuple(line["group"]),
            prompt_tokens=line["prompt_tokens"],
            as_alone=line["as_alone"],
        )


_BEGINNING = '{"question_id": '  # how a line of an answers file begins


@contextmanager
def _alone_with(name: Path) -> Iterator[None]:
    """Keep other runs from writing an answers file meanwhile; it need not exist yet."""
    made = not name.exists()
    if not name.parent.is_dir():
        raise BadInputError(f"there is no folder {name.parent}")
    try:
        if name.exists() and not name.is_file():  # reading a device may never end
            raise BadInputError(f"--answers is {name}, which is not a file")
        name.open("a").close()
    except OSError as error:
        raise BadInputError(f"--answers is {name}: {error.strerror}") from None
    taken = f"another run writes {name}; wait for it, or give another --answers file"
    with locked(name, taken):
        try:
            yield
        finally:
            if made and name.exists() and not name.stat().st_size:  # nothing was measured
                name.unlink()


class AnswersFile:
    """Answers on disk, one per line with its settings: read once, then appended to."""

    def __init__(self, path: str | Path) -> None:
        """Read the file; raises BadInputError naming the first line that is no answer.

        An incomplete last line, left by a process that was killed, is removed from the file.
        """
        self.path = Path(path)
        self.lines: list[tuple[Answer, Settings]] = []
        # Only "\n" ends a line: JSON strings may hold the other separators.
        *whole, rest = self._read().split("\n")
        for n, line in enumerate(whole, 1):
            if line:
                self._add(n, line)
        if rest:
            try:
                self._add(len(whole) + 1, rest)
                self._append("\n")
            except BadInputError:
                if not self.lines and not rest.startswith(_BEGINNING):
                    raise
                os.truncate(self.path, self.path.stat().st_size - len(rest.encode()))

    def check(self, stored: Settings, settings: Settings, names: Iterable[str]) -> None:
        """Raise BadInputError unless the settings in `names` equal the stored ones of a line."""
        for name in sorted(names):
            before, now = stored.get(name), settings[name]
            if before != now:
                raise BadInputError(
                    f"{self.path} was made with {name} {before}, now it is {now}; give another "
                    f"--answers file"
                )

    def append(self, answers: Iterable[Answer], settings: Settings) -> None:
        self._append("".join(json.dumps(each.to_dict(settings)) + "\n" for each in answers))

    def _append(self, text: str) -> None:
        with name_in_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(text)

    def _read(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise BadInputError(f"cannot read {self.path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise BadInputError(f"{self.path} is not UTF-8 text") from None

    def _add(self, n: int, line: str) -> None:
        try:
            content = json.loads(line)
            found, settings = Answer.from_dict(content), dict(content["settings"])
        except (ValueError, KeyError, TypeError, IndexError):
            raise BadInputError(
                f"{self.path}, line {n}, is not an answer of this program; give another file"
            ) from None
        self.lines.append((found, settings))


@contextmanager
def answers_file(path: str | Path | None) -> Iterator[AnswersFile | None]:
    """Open an answers file that no other run may write meanwhile; None without a path.

    Raises BadInputError, naming the file, if another run writes it, or if it cannot be used.
    """
    if path is None:
        yield None
        return
    with _alone_with(Path(path)):
        yield AnswersFile(path)


_OF_A_DTYPE = {"arithmetic", "bits", "drafts"}
"""Settings that differ between the dtypes of one run; a drafter's digest covers its own dtype."""


def matching(file: AnswersFile, dtype: str, settings: Settings) -> list[Answer]:
    """Return a file's answers of one dtype; BadInputError if others do not share its settings."""
    for answer, stored in file.lines:
        shared = settings.keys() - (set() if answer.dtype == dtype else _OF_A_DTYPE)
        file.check(stored, settings, shared)
    return [answer for answer, _ in file.lines if answer.dtype == dtype]


def _integers(values: object) -> list[int]:
    if not isinstance(values, list) or not all(type(v) is int for v in values):
        raise TypeError
    return values


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    return float(value)
