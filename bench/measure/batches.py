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
from typing import Any

import mlx.core as mx

from redrafter_mlx.bench.measure.answers import Settings
from redrafter_mlx.bench.measure.methods import (
    Clock,
    Method,
    Runner,
    finish_mlx_lm,
    our_stream,
)
from redrafter_mlx.bench.measure.plan import Prepared, in_turn
from redrafter_mlx.config import check_int
from redrafter_mlx.distributed.plain_batch import PlainBatch
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError, EngineFailedError, out_of_memory


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
    out_of_memory: the batch does not fit; the lists are empty
    """

    token_ids: list[list[int]]
    tokens: list[int]
    seconds: list[float]
    steps: list[int]
    first_seconds: float
    peak_memory: float
    matches_plain: bool | None = None
    out_of_memory: bool = False


@dataclass(frozen=True)
class BatchKey:
    """Identity of a run: its method and its questions; `prompts` is the hash of their prompts."""

    method: Method
    question_ids: tuple[int | str, ...]
    prompts: str

    @classmethod
    def of(cls, method: Method, group: Sequence[Prepared]) -> BatchKey:
        prompts = json.dumps([question.prompt_ids for question in group])
        return cls(method, ids_of(group), hashlib.sha256(prompts.encode()).hexdigest())


Case = tuple[Method, Sequence[Prepared]]
"""A method and the questions that it answers in one batch."""


def ids_of(group: Sequence[Prepared]) -> tuple[int | str, ...]:
    return tuple(question.id for question in group)


@dataclass(frozen=True)
class BatchMeasurement:
    """A run of one method on one batch of questions."""

    method: Method
    questions: Sequence[Prepared]
    run: BatchRun

    def compared(self, plain: Mapping[int | str, Sequence[int]]) -> BatchMeasurement:
        """Return the measurement with `matches_plain`, unless it is sampled.

        plain: the tokens of mlx-lm's loop for one prompt, by question id
        """
        if self.method.temperature > 0 or self.run.out_of_memory:
            return self
        matches = all(
            ids == plain[question.id]
            for question, ids in zip(self.questions, self.run.token_ids, strict=True)
        )
        return replace(self, run=replace(self.run, matches_plain=matches))

    def to_dict(self, settings: Settings) -> dict[str, object]:
        """Return the JSON object that is a line of the answers file."""
        key = BatchKey.of(self.method, self.questions)
        return {"batch": asdict(key), "run": asdict(self.run), "settings": settings}


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
    """

    questions: Sequence[Prepared]
    methods: Sequence[Method]
    sizes: Sequence[int]
    max_tokens: int
    repeats: int
    seed: int

    def __post_init__(self) -> None:
        check_int("--max-tokens", self.max_tokens, 2, None)
        check_int("--repeats", self.repeats, 1, None)
        if max(self.sizes) > len(self.questions):
            raise BadInputError(
                f"--batch-size is {max(self.sizes)}, more than the questions that there are to ask "
                f"at once ({len(self.questions)}); give more with --questions or a higher --limit"
            )

    @property
    def size(self) -> int:
        """Number of timed runs."""
        return sum(1 for _ in self.order())

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
        runs: dict[tuple[int | str, ...], dict[Method, list[BatchMeasurement]]] = {}
        for m in measured:
            runs.setdefault(ids_of(m.questions), {}).setdefault(m.method, []).append(m)
        return [
            measurement
            for by_method in runs.values()
            for repeats in zip(*by_method.values(), strict=False)
            for measurement in repeats
            if len(by_method) == len(self.methods)
        ]

    def order(self) -> Iterator[Case]:
        """Yield all timed runs; the first questions fill up the last batch of each size."""
        around = [*self.questions, *self.questions]
        for repeat in range(self.repeats):
            for size in self.sizes:
                for at in range(0, len(self.questions), size):
                    for method in in_turn(self.methods, repeat + at // size):
                        yield method, around[at : at + size]


class BatchRunner:
    """Runs methods on batches of prompts, with one loaded model."""

    def __init__(
        self, redrafters: Mapping[str | None, Redrafter], clock: Clock = time.perf_counter
    ) -> None:
        self._redrafter = Runner(redrafters).redrafter
        self._clock = clock

    def measure(self, plan: BatchPlan, cases: Sequence[Case]) -> Iterator[BatchMeasurement]:
        """Time the cases, after untimed runs that compile: the first of each method and size.

        A batch that does not fit in memory gives a run that says so.
        """
        too_large = BatchRun([], [], [], [], 0.0, 0.0, out_of_memory=True)

        def run(method: Method, group: Sequence[Prepared]) -> BatchRun:
            prompts = [q.prompt_ids for q in group]
            options = method.options(plan.max_tokens, plan.seed)
            if not self._redrafter(method).fits(prompts, options):
                return too_large
            try:
                return self.run(method, prompts, plan.max_tokens, plan.seed)
            except (MemoryError, RuntimeError, EngineFailedError) as error:
                if not out_of_memory(error):
                    raise
                return too_large

        untimed = {(method, len(group)): (method, group) for method, group in reversed(cases)}
        for case in reversed(untimed.values()):
            run(*case)
        for method, group in cases:
            yield BatchMeasurement(method, group, run(method, group))

    def run(
        self, method: Method, prompts: Sequence[list[int]], max_tokens: int, seed: int
    ) -> BatchRun:
        """Answer the prompts in one batch."""
        self._redrafter(method).thread.run(finish_mlx_lm)
        mx.reset_peak_memory()
        ids: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        steps = [0] * len(prompts)
        began = self._clock()
        with closing(self._tokens(method, prompts, max_tokens, seed)) as tokens:
            for row, token, step in tokens:
                ids[row].append(token)
                times[row].append(self._clock())
                steps[row] = step
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
    ) -> Generator[tuple[int, int, int], None, None]:
        """Yield each token: its prompt's index, its id, and the target calls after the prompt's."""
        redrafter = self._redrafter(method)
        if method.ours:
            requests = [method.request(redrafter, p, max_tokens, seed) for p in prompts]
            for row, response in redrafter.respond_all(requests):
                yield row, response.token, response.steps
        else:  # in the same thread as ours
            theirs = _mlx_lm_tokens(redrafter, method, prompts, max_tokens, seed)
            yield from redrafter.thread.iterate(theirs)


def _mlx_lm_tokens(
    redrafter: Redrafter, method: Method, prompts: Sequence[list[int]], max_tokens: int, seed: int
) -> Generator[tuple[int, int, int], None, None]:
    mx.random.seed(seed)
    model, mirror, stream = redrafter.model, redrafter.mirror, our_stream()
    stop = [*redrafter.tokenizer.eos_token_ids]
    limits = [redrafter.prompts.room_for(prompt, max_tokens) for prompt in prompts]
    batch = PlainBatch([*prompts], limits, stop, method.temperature)
    run = batch.run(model, stream) if mirror is None else mirror.run(batch, model, stream)
    steps = [0] * len(prompts)
    for row, token in run:
        yield row, token, steps[row]
        steps[row] += 1
