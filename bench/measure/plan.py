"""The order of measurement: question by question, every method in turn.

All methods answer a question right after each other, so a machine that is hot or busy for a minute
slows them all alike. The method that comes first changes from question to question.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from redrafter_mlx.bench.measure.answers import Answer, AnswerKey
from redrafter_mlx.bench.measure.methods import BASELINE, Method
from redrafter_mlx.bench.measure.packing import Prefixes
from redrafter_mlx.bench.measure.questions import Question
from redrafter_mlx.bench.measure.runner import Run, Runner
from redrafter_mlx.checks import check_int, check_number
from redrafter_mlx.config import AcceptMethod
from redrafter_mlx.errors import BadInputError


@dataclass(frozen=True)
class Prepared:
    """A question and its prompt's token ids."""

    question: Question
    prompt_ids: list[int]

    @property
    def id(self) -> int | str:
        assert self.question.id is not None, "every chosen question has one"
        return self.question.id


Conversation = list[dict[str, str]]
"""Messages, each with `role` and `content`."""


def prepared_turns(
    questions: Sequence[Question],
    turns: int,
    encode: Callable[[Conversation], list[int]],
    answer: Callable[[list[int]], str],
) -> Iterator[Prepared]:
    """Yield the prompts of each question's first turns, each with the turns and answers before it.

    answer: answers the prompt of an earlier turn, in the same way for all methods
    """
    for question in questions:
        messages: Conversation = []
        asked = question.turns[:turns]
        for turn, text in enumerate(asked, 1):
            messages.append({"role": "user", "content": text})
            ids = encode(messages)
            number = question.id if turn == 1 else f"{question.id}, turn {turn}"
            yield Prepared(replace(question, id=number), ids)
            if turn < len(asked):
                messages.append({"role": "assistant", "content": answer(ids)})


def resized(prompt_ids: Sequence[int], length: int) -> list[int]:
    """Return a prompt of exactly `length` tokens, by repeating `prompt_ids` and cutting the start.

    So it ends as they do, where an answer begins.
    """
    times = -(-length // max(1, len(prompt_ids)))
    return (list(prompt_ids) * times)[-length:]


@dataclass(frozen=True)
class Case:
    """One timed run: questions that a method answers at once."""

    method: Method
    questions: Sequence[Prepared]
    at: int  # index of the first question
    repeat: int  # counted from 0

    @property
    def group(self) -> tuple[int | str, ...]:
        return tuple(question.id for question in self.questions)


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    questions: Sequence[Prepared]
    methods: Sequence[Method]
    dtype: str
    max_tokens: int
    repeats: int  # number of answers to each question by each method
    warmup: int  # number of untimed answers to the first questions by each method
    delay: float  # seconds to rest before each run, for machines that overheat
    seed: int  # question i is sampled with seed + i, in every repeat and in every batch
    prompt_tokens: int | None = None  # that prompts were brought to; None: left unchanged

    def __post_init__(self) -> None:
        check_int("--max-tokens", self.max_tokens, 2, None)
        check_int("--repeats", self.repeats, 1, None)
        check_int("--warmup", self.warmup, 0, None)
        check_number("--delay", self.delay, low=0, high=86_400)
        check_int("--seed", self.seed, 0, None)
        largest = max((method.batch_size or 1 for method in self.methods), default=1)
        if largest > len(self.questions):
            raise BadInputError(
                f"--batch-size is {largest}, more than the questions that there are to ask at once "
                f"({len(self.questions)}); give more with --questions or a higher --limit"
            )

    @property
    def size(self) -> int:
        """Number of timed runs."""
        return sum(1 for _ in self.order())

    def order(self) -> Iterator[Case]:
        """Yield all timed runs; the first questions fill up the last batch of each size."""
        around = [*self.questions, *self.questions]
        by_size: dict[int | None, list[Method]] = {}
        for method in self.methods:
            by_size.setdefault(method.batch_size, []).append(method)
        for repeat in range(self.repeats):
            for size, methods in by_size.items():
                for turn, at in enumerate(range(0, len(self.questions), size or 1)):
                    for method in in_turn(methods, repeat + turn):
                        yield Case(method, around[at : at + (size or 1)], at, repeat)

    def split(self, answers: Iterable[Answer]) -> tuple[list[Answer], list[Case]]:
        """Split into the answers of finished runs, to the same prompts, and the missing ones."""
        found = {answer.key: answer for answer in answers}
        done, missing = list[Answer](), list[Case]()
        for case in self.order():
            answered = []
            for question in case.questions:
                key = (self.dtype, case.method, self.prompt_tokens, case.group, question.id)
                if (before := found.get(AnswerKey(*key, case.repeat))) is None:
                    break
                if before.prompt_ids != question.prompt_ids:
                    raise BadInputError(
                        f"question {question.id} was another one when it was answered; "
                        f"give another --answers file"
                    )
                answered.append(before)
            if len(answered) == len(case.questions):
                done += answered
            else:
                missing.append(case)
        return done, missing


def in_turn(methods: Sequence[Method], turn: int) -> list[Method]:
    """Return the methods in the order of this turn: the one that comes first rotates."""
    first = turn % len(methods)
    return [*methods[first:], *methods[:first]]


def measure(
    plan: Plan,
    runner: Runner,
    cases: Sequence[Case] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[list[Answer]]:
    """Time the cases, all of the plan by default; yields the answers of each when it is complete.

    Before, mlx-lm's loop answers each question that a greedy batch is asked.
    """
    cases = [*plan.order()] if cases is None else cases

    def run(case: Case) -> list[Run]:
        prompts, n = [q.prompt_ids for q in case.questions], len(plan.questions)
        seeds = [plan.seed + (case.at + i) % n for i in range(len(prompts))]
        return runner.run_if_it_fits(case.method, prompts, plan.max_tokens, seeds)

    batched = [c for c in cases if c.method.batch_size is not None and c.method.temperature == 0]
    asked = {q.id: q.prompt_ids for case in batched for q in case.questions}
    alone = {
        key: runner.run(Method(BASELINE), prompt, plan.max_tokens, plan.seed).token_ids
        for key, prompt in asked.items()
    }
    for method in dict.fromkeys(case.method for case in cases):
        for _ in range(plan.warmup):
            run(Case(method, plan.questions[: method.batch_size or 1], 0, 0))
    for case in cases:
        if plan.delay:
            sleep(plan.delay)
        runs, ended = run(case), time.time()
        compared = case.method.batch_size is not None and case.method.temperature == 0
        yield [
            Answer(
                q.id, q.question.category, plan.dtype, case.method, case.repeat, q.prompt_ids, run,
                ended, case.group, plan.prompt_tokens,
                run.token_ids == alone[q.id] if compared and not run.out_of_memory else None,
            )
            for q, run in zip(case.questions, runs, strict=True)
        ]  # fmt: skip


Shape = tuple[int | None, int | None]
"""Beam width and length; None for the automatic shape."""

Thresholds = tuple[float | None, float | None]
"""Epsilon and delta of typical acceptance; None for the defaults."""


def list_methods(
    shapes: Mapping[str | None, Sequence[Shape]],
    max_nodes: int | None,
    accepts: Sequence[AcceptMethod] | None,
    temperatures: Sequence[float],
    draft_tokens: Sequence[int],
    prefixes: Sequence[Prefixes] = ("all",),
    thresholds: Sequence[Thresholds] = ((None, None),),
    batch_sizes: Sequence[int | None] = (None,),
) -> list[Method]:
    """List the baselines, and drafted methods for all combinations of the arguments.

    Only typical acceptance is combined with `thresholds`. Beside fixed shapes, the automatic one is
    combined with the prefixes "all" alone, for others need a fixed shape.

    shapes:       by drafter name; the name is None if there is only one drafter
    accepts:      None for the default: greedy at temperature 0, sample above
    draft_tokens: for mlx-lm's speculative decoding; empty leaves that method out
    Raises BadInputError if an acceptance method fits no temperature, or a shape is impossible.
    """
    methods: list[Method] = []
    drawn: Sequence[AcceptMethod] = ("sample",) if accepts is None else accepts
    for t in temperatures:
        methods += [Method("mlx-lm", t), Method("autoregressive", t)]
        methods += [Method("mlx-lm speculative", t, draft_tokens=k) for k in draft_tokens]
        fitting: list[AcceptMethod] = ["greedy"] if t == 0 else [a for a in drawn if a != "greedy"]
        methods += [
            Method(
                "redrafter", t, accept, W, L, max_nodes, drafter=drafter, prefixes=packed,
                epsilon=epsilon, delta=delta,
            )
            for accept in fitting
            for epsilon, delta in (thresholds if accept == "typical" else ((None, None),))
            for drafter, own in shapes.items()
            for W, L in own
            for packed in prefixes
            if packed == "all" or (W, L) != (None, None) or len(own) == 1
        ]  # fmt: skip
    for accept in accepts or ():
        if not any((t == 0) == (accept == "greedy") for t in temperatures):
            needs = "0" if accept == "greedy" else "above 0"
            raise BadInputError(f"--accept holds {accept!r}; give a --temperature {needs}")
    for method in methods:
        method.options(2, 0)
    return [replace(method, batch_size=size) for size in batch_sizes for method in methods]
