"""Pace by processor time, on a machine that is busy with other work, where clocks say little.

With one thread (OMP_NUM_THREADS=1 MKL_NUM_THREADS=1) what other processes do changes it by a few
percent. Each question is answered by all drafters in turn.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict

from redrafter_mlx.bench.measure.questions import read_questions
from redrafter_mlx.drafting.names import NONE, parse
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.loading.drafter import prepare_drafter
from redrafter_mlx.loading.load import draft_with
from redrafter_mlx.loading.target import load_target


def seconds_of_answer(model: Redrafter, question: str, max_tokens: int) -> tuple[float, int, int]:
    """Return the processor's seconds after the first token, and the tokens and steps in them."""
    began, tokens, steps = None, 0, 0
    for answer in model.stream(question, max_tokens=max_tokens, cache_prompt=False):
        began = time.process_time() if began is None else began
        tokens, steps = answer.generation_tokens - 1, answer.steps
    return 0.0 if began is None else time.process_time() - began, tokens, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", help="a file of questions")
    parser.add_argument("--model", help="the default model if not given")
    parser.add_argument("--drafter", action="append", required=True)
    parser.add_argument("--limit", type=int, help="number of questions of each category")
    parser.add_argument("--max-tokens", type=int, default=128)
    given = parser.parse_args()
    loaded = load_target(given.model)
    names = [NONE, *given.drafter]
    models = {name: draft_with(prepare_drafter(parse(name)), loaded) for name in names}
    asked: defaultdict[str, list[str]] = defaultdict(list)
    for question in read_questions(given.questions):
        asked[question.category].append(question.text)
    of_all = {name: [0.0, 0, 0] for name in names}
    for category, questions in asked.items():
        sums = {name: [0.0, 0, 0] for name in names}
        for text in questions[: given.limit]:
            for name, model in models.items():
                found = seconds_of_answer(model, text, given.max_tokens)
                for of in (sums[name], of_all[name]):
                    of[:] = [a + b for a, b in zip(of, found, strict=True)]
        print(describe(category, sums), flush=True)
    print(describe("all", of_all))


def describe(what: str, sums: dict[str, list[float]]) -> str:
    """Return a line: of each drafter the pace, as a share of plain decoding's, and tokens/step.

    Answers of one token have no pace.
    """
    seconds, tokens, _ = sums[NONE]
    cells = []
    for name, (took, emitted, steps) in sums.items():
        if not emitted or not tokens:
            cells.append(f"{name} -")
            continue
        speedup = emitted / took / (tokens / seconds)
        cells.append(f"{name} {emitted / took:.2f} tok/s {speedup:.3f}x {emitted / steps:.2f}")
    return f"{what}: " + ", ".join(cells)


if __name__ == "__main__":
    main()
