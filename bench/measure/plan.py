"""The order of measurement: question by question, every method in turn.

All methods answer a question right after each other, so a machine that is hot or busy for a minute
slows them all alike. The method that comes first changes from question to question.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from redrafter_mlx.bench.measure.answers import Answer
from redrafter_mlx.bench.measure.methods import Method, Runner
from redrafter_mlx.bench.measure.packing import Prefixes
from redrafter_mlx.bench.measure.questions import Question
from redrafter_mlx.config import AcceptMethod, check_int, check_number
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

    Args:
      encode: returns the prompt of a conversation
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
class Plan:
    """What to measure.

    repeats: number of answers to each question by each method
    warmup:  number of untimed answers to the first question by each method
    delay:   seconds to rest before each run, for machines that overheat
    seed:    question i is sampled with seed + i, in every repeat
    """

    questions: Sequence[Prepared]
    methods: Sequence[Method]
    dtype: str
    max_tokens: int
    repeats: int
    warmup: int
    delay: float
    seed: int

    def __post_init__(self) -> None:
        check_int("--max-tokens", self.max_tokens, 2, None)
        check_int("--repeats", self.repeats, 1, None)
        check_int("--warmup", self.warmup, 0, None)
        check_number("--delay", self.delay, low=0, high=86_400)
        check_int("--seed", self.seed, 0, None)

    @property
    def size(self) -> int:
        """Number of timed runs."""
        return self.repeats * len(self.questions) * len(self.methods)

    def order(self) -> Iterator[tuple[int, Prepared, Method, int]]:
        """Yield all timed runs: the question's index, the question, the method, the repeat."""
        for repeat in range(self.repeats):
            for i, prepared in enumerate(self.questions):
                for method in in_turn(self.methods, repeat + i):
                    yield i, prepared, method, repeat


def in_turn(methods: Sequence[Method], turn: int) -> list[Method]:
    """Return the methods in the order of this turn: the one that comes first rotates."""
    first = turn % len(methods)
    return [*methods[first:], *methods[:first]]


def measure(
    plan: Plan,
    runner: Runner,
    done: Collection[Answer] = (),
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Answer]:
    """Time the runs that are not in `done`; yields each answer as soon as it is complete.

    Raises BadInputError if a question in `done` had another prompt.
    """
    finished = {answer.key: answer for answer in done}
    todo = []
    for i, prepared, method, repeat in plan.order():
        before = finished.get((plan.dtype, method, prepared.id, repeat))
        if before is None:
            todo.append((i, prepared, method, repeat))
        elif before.prompt_ids != prepared.prompt_ids:
            raise BadInputError(
                f"question {prepared.id} was another one when it was answered; "
                f"give another --answers file"
            )
    for method in dict.fromkeys(method for *_, method, _ in todo):
        for _ in range(plan.warmup):
            runner.run(method, plan.questions[0].prompt_ids, plan.max_tokens, plan.seed)
    for i, prepared, method, repeat in todo:
        if plan.delay:
            sleep(plan.delay)
        run = runner.run(method, prepared.prompt_ids, plan.max_tokens, plan.seed + i)
        question = prepared.question
        yield Answer(
            prepared.id, question.category, plan.dtype, method, repeat, prepared.prompt_ids, run,
            time.time(),
        )  # fmt: skip


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
) -> list[Method]:
    """List the baselines, and drafted methods for all combinations of the arguments.

    Only typical acceptance is combined with `thresholds`. Beside fixed shapes, the automatic one is
    combined with the prefixes "all" alone, for others need a fixed shape.

    Args:
      shapes:       beam shapes by drafter name; the name is None if there is only one drafter
      accepts:      None for the default: greedy at temperature 0, sample above
      draft_tokens: for mlx-lm's speculative decoding; empty leaves that method out
    Raises:
      BadInputError: if an acceptance method fits no temperature, or a shape is impossible
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
    return methods
