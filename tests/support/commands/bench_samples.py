"""Made-up answers for tests of the figures that are computed from them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from redrafter_mlx.bench.measure.answers import Answer, AnswersFile, Settings, matching
from redrafter_mlx.bench.measure.machine import LoadedModel, Machine
from redrafter_mlx.bench.measure.methods import Method
from redrafter_mlx.bench.measure.runner import Run

PLAIN = Method("mlx-lm")
DRAFTED = Method("redrafter", 0.0, "greedy", 2, 4)

MACHINE = Machine("M0", "gpu", 8, "macOS 99", "3.12", "0.1.0", "0.32", "0.32", "Accelerate")

SETTINGS: Settings = {
    "model": "tiny", "model_hash": "sha256:1", "drafts": "drafter", "arithmetic": "float32",
    "max_tokens": 64, "seed": 0, "chip": "M0", "mlx": "1", "tf32": False, "ranks": 1,
    "ignore_eos": False,
}  # fmt: skip


def store(path: Path, *answers: Answer, **settings: object) -> None:
    """Append answers to a file."""
    AnswersFile(path).append(answers, {**SETTINGS, **settings})


def stored(path: Path, dtype: str = "float32", **settings: object) -> list[Answer]:
    """Read the answers of one dtype."""
    return matching(AnswersFile(path), dtype, {**SETTINGS, **settings})


def loaded(dtype: str = "float32", bits: int | None = None) -> LoadedModel:
    arithmetic = dtype if bits is None else "float32"
    return LoadedModel(dtype, "tiny", "sha256:1", arithmetic, bits, "drafter", "sha256:2")


def answer(
    method: Method = PLAIN,
    question: int = 1,
    repeat: int = 0,
    *,
    lengths: Sequence[int] = (1, 1, 1),
    seconds: float = 1.0,
    tokens: Sequence[int] | None = None,
    category: str = "math",
    dtype: str = "float32",
    accepted: Sequence[int] | None = None,
    nodes: Sequence[int] = (),
    query_rows: Sequence[int] = (),
) -> Answer:
    """Return the answer of one run; its tokens count upwards if none are given."""
    emitted = list(tokens) if tokens is not None else list(range(1 + sum(lengths)))
    run = Run(
        token_ids=emitted,
        text="text",
        accept_lengths=list(lengths),
        accepted=[n - 1 for n in lengths] if accepted is None else list(accepted),
        nodes=list(nodes),
        query_rows=list(query_rows or nodes),
        shapes=[[2, 4]] * len(nodes),
        first_token_seconds=0.25,
        decode_seconds=seconds,
        timed_tokens=sum(lengths),
        peak_memory=1.5,
    )
    return Answer(question, category, dtype, method, repeat, [7, 8], run, 1000.0, (question,))


def random_answers(seed: int, questions: int = 5, repeats: int = 3) -> list[Answer]:
    """Return runs of both methods with random lengths and times; some repeats are missing."""
    rng = random.Random(seed)
    answers = []
    for question in range(questions):
        category = ("math", "stem")[question % 2]
        lengths = [rng.randint(1, 4) for _ in range(rng.randint(1, 9))]
        for method in (PLAIN, DRAFTED):
            for repeat in range(repeats - rng.randint(0, 1)):
                steps = lengths if method == DRAFTED else [1] * sum(lengths)
                answers.append(
                    answer(method, question, repeat, lengths=steps, seconds=rng.uniform(0.5, 2),
                           category=category,
                           nodes=[rng.randint(1, 7) for _ in steps] if method == DRAFTED else ())
                )  # fmt: skip
    return answers
