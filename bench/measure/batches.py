"""Batched decoding, timed: mlx-lm's own batches, and ours with and without drafts.

Timing starts when every prompt has its first token, so that a batch has its full size from the
start; each answer is then timed up to its last token.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx

from redrafter_mlx.bench.measure.answers import Settings
from redrafter_mlx.bench.measure.methods import Clock, Method, our_stream
from redrafter_mlx.bench.measure.plan import Prepared
from redrafter_mlx.distributed.plain_batch import PlainBatch
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError


@dataclass(frozen=True)
class BatchRun:
    """One run of a method on several prompts; lists have one entry per answer.

    token_ids:     including the ending token
    tokens:        number of tokens after every prompt had its first token
    seconds:       from that moment to the answer's last token
    steps:         target calls that the answer took part in, without the prompt's
    first_seconds: from the start to the last prompt's first token
    peak_memory:   GB
    matches_plain: whether all tokens equal those of mlx-lm's loop for one prompt; None if sampled,
                   or not compared
    """

    token_ids: list[list[int]]
    tokens: list[int]
    seconds: list[float]
    steps: list[int]
    first_seconds: float
    peak_memory: float
    matches_plain: bool | None = None


class BatchToken(NamedTuple):
    """A token of one answer, and the number of target calls after the prompt's so far."""

    row: int
    id: int
    steps: int


@dataclass(frozen=True)
class BatchKey:
    """Identity of a run: its method and its questions; `prompts` is the hash of their prompts."""

    method: Method
    question_ids: tuple[int | str, ...]
    prompts: str

    @classmethod
    def of(cls, method: Method, group: Sequence[Prepared]) -> BatchKey:
        prompts = json.dumps([question.prompt_ids for question in group])
        ids = tuple(question.question.id or 0 for question in group)
        return cls(method, ids, hashlib.sha256(prompts.encode()).hexdigest())


Case = tuple[Method, Sequence[Prepared]]
"""A method and the questions that it answers in one batch."""


@dataclass(frozen=True)
class BatchMeasurement:
    """A run of one method on one batch of questions."""

    method: Method
    questions: Sequence[Prepared]
    run: BatchRun

    @property
    def size(self) -> int:
        return len(self.questions)

    def compared(self, plain: Mapping[int | str, Sequence[int]]) -> BatchMeasurement:
        """Return the measurement with `matches_plain`, unless it is sampled or has it already.

        plain: the tokens of mlx-lm's loop for one prompt, by question id
        """
        if self.method.temperature > 0 or self.run.matches_plain is not None:
            return self
        matches = all(
            ids == plain[question.question.id or 0]
            for question, ids in zip(self.questions, self.run.token_ids, strict=True)
        )
        return replace(self, run=replace(self.run, matches_plain=matches))

    def to_dict(self, settings: Settings) -> dict[str, object]:
        """Return the JSON object that is a line of the answers file."""
        key = BatchKey.of(self.method, self.questions)
        return {"batch": asdict(key), "run": asdict(self.run), "settings": asdict(settings)}


def read_run(line: dict[str, Any]) -> tuple[BatchKey, BatchRun]:
    """Parse a line of the answers file; raises KeyError or TypeError if it is invalid."""
    batch = line["batch"]
    key = BatchKey(Method(**batch["method"]), tuple(batch["question_ids"]), str(batch["prompts"]))
    return key, BatchRun(**line["run"])


@dataclass(frozen=True)
class BatchPlan:
    """What to measure.

    sizes:   batch sizes; each size goes through all questions
    repeats: number of times that each method answers each group of questions
    seed:    random seed of sampled answers
    """

    questions: Sequence[Prepared]
    methods: Sequence[Method]
    sizes: Sequence[int]
    max_tokens: int
    repeats: int
    seed: int

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--max-tokens", self.max_tokens, 2),
            ("--repeats", self.repeats, 1),
        ):
            if value < least:
                raise BadInputError(f"{name} is {value}; it must be at least {least}")
        if max(self.sizes) > len(self.questions):
            raise BadInputError(
                f"--batch-size is {max(self.sizes)}, more than the questions that there are to ask "
                f"at once ({len(self.questions)}); give more with --questions or a higher --limit"
            )

    @property
    def size(self) -> int:
        """Number of timed runs."""
        groups = sum(len(self.groups(size)) for size in self.sizes)
        return self.repeats * len(self.methods) * groups

    def groups(self, size: int) -> list[Sequence[Prepared]]:
        """Split the questions into batches; the first questions fill up the last batch."""
        Q = len(self.questions)
        around = [*self.questions, *self.questions]
        return [around[at : at + size] for at in range(0, Q, size)]

    def split(
        self, done: Iterable[tuple[BatchKey, BatchRun]]
    ) -> tuple[list[BatchMeasurement], list[Case]]:
        """Split the plan into the measurements that are done and the cases that are missing."""
        runs: dict[BatchKey, list[BatchRun]] = {}
        for key, run in done:
            runs.setdefault(key, []).append(run)
        finished, missing = [], []
        for method, group in self.order():
            if found := runs.get(BatchKey.of(method, group)):
                finished.append(BatchMeasurement(method, group, found.pop(0)))
            else:
                missing.append((method, group))
        return finished, missing

    def complete(self, measured: Iterable[BatchMeasurement]) -> list[BatchMeasurement]:
        """Return the measurements of the rounds that every method has finished.

        A round is one repeat of one group of questions. All rounds are complete unless the run was
        interrupted.
        """
        runs: dict[tuple[int | str | None, ...], dict[Method, list[BatchMeasurement]]] = {}
        for m in measured:
            asked = tuple(question.question.id for question in m.questions)
            runs.setdefault(asked, {}).setdefault(m.method, []).append(m)
        return [
            measurement
            for by_method in runs.values()
            for repeats in zip(*by_method.values(), strict=False)
            for measurement in repeats
            if len(by_method) == len(self.methods)
        ]

    def order(self) -> Iterator[Case]:
        """Yield all timed runs; the method that comes first rotates."""
        for repeat in range(self.repeats):
            for size in self.sizes:
                for i, group in enumerate(self.groups(size)):
                    first = (repeat + i) % len(self.methods)
                    for method in (*self.methods[first:], *self.methods[:first]):
                        yield method, group


class BatchRunner:
    """Runs methods on batches of prompts, with one loaded model."""

    def __init__(
        self, redrafters: Mapping[str | None, Redrafter], clock: Clock = time.perf_counter
    ) -> None:
        self._redrafters = redrafters
        self._first = next(iter(redrafters.values()))
        self._clock = clock

    def measure(
        self, plan: BatchPlan, missing: Sequence[Case] | None = None
    ) -> Iterator[BatchMeasurement]:
        """Time the missing cases (None: all), after untimed runs that compile."""
        cases = list(plan.order()) if missing is None else missing
        untimed = {(method, len(group)): (method, group) for method, group in reversed(cases)}
        for method, group in reversed(untimed.values()):
            self.run(method, [q.prompt_ids for q in group], plan.max_tokens, plan.seed)
        for method, group in cases:
            run = self.run(method, [q.prompt_ids for q in group], plan.max_tokens, plan.seed)
            yield BatchMeasurement(method, group, run)

    def run(
        self, method: Method, prompts: Sequence[list[int]], max_tokens: int, seed: int
    ) -> BatchRun:
        """Answer the prompts in one batch."""
        mx.reset_peak_memory()
        B = len(prompts)
        ids: list[list[int]] = [[] for _ in range(B)]
        times: list[list[float]] = [[] for _ in range(B)]
        steps = [0] * B
        began = self._clock()
        with closing(self._tokens(method, prompts, max_tokens, seed)) as tokens:
            for token in tokens:
                ids[token.row].append(token.id)
                times[token.row].append(self._clock())
                steps[token.row] = token.steps
        full = max(row[0] for row in times)
        return BatchRun(
            token_ids=ids,
            tokens=[sum(at > full for at in row) for row in times],
            seconds=[max(row[-1] - full, 0.0) for row in times],
            steps=steps,
            first_seconds=full - began,
            peak_memory=mx.get_peak_memory() / 1e9,
        )

    def _tokens(
        self, method: Method, prompts: Sequence[list[int]], max_tokens: int, seed: int
    ) -> Generator[BatchToken, None, None]:
        if not method.ours:
            yield from self._mlx_lm_tokens(method, prompts, max_tokens, seed)
            return
        drafts = method.name == "redrafter"
        redrafter = self._redrafters[method.drafter] if drafts else self._first
        options = method.options(max_tokens, seed)
        for row, response in redrafter.batch(prompts, options=options):
            yield BatchToken(row, response.token, response.steps)

    def _mlx_lm_tokens(
        self, method: Method, prompts: Sequence[list[int]], max_tokens: int, seed: int
    ) -> Iterator[BatchToken]:
        mx.random.seed(seed)
        model, mirror, stream = self._first.model, self._first.mirror, our_stream()
        stop = [*self._first.tokenizer.eos_token_ids]
        batch = PlainBatch([*prompts], max_tokens, stop, method.temperature)
        run = batch.run(model, stream) if mirror is None else mirror.run(batch, model, stream)
        counts = [0] * len(prompts)
        for row, token in run:
            yield BatchToken(row, token, counts[row])
            counts[row] += 1
