"""Compares forms of drafters that train on the same texts for the same time, run manually.

    python tests/support/by_hand/compare_forms.py FOLDER [--minutes 12] [--answer-tokens 80000]
        [--form recurrent|medusa|mlp|eagle|mtp|dspark ...] [--seed 0]

The target is SmolLM2. It writes the texts once, before the time of the first form begins. What a
form reads of them, and the evaluation after its time, do not count. Each drafter is left in
FOLDER/FORM, for `redrafter-mlx quality` and `bench --drafter`. The last line of each form is JSON:
steps, positions/s, and tokens/step on held-out texts. A form that has finished is left out when the
command is repeated.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import redrafter_mlx  # noqa: F401
from redrafter_mlx.distill.drafter_forms import FORMS, form_named
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.distill.plan import plan
from redrafter_mlx.distill.run import fit, write
from redrafter_mlx.distill.training.learner import Step
from redrafter_mlx.distill.training.trainer import Evaluation

COMPARED = ("recurrent", "eagle", "mtp", "dspark")
DRAFTS = 3


@dataclass
class Spent:
    """The time of the steps so far."""

    seconds: float = 0.0


def compare(given: argparse.Namespace, form: str) -> None:
    """Train one form, unless it is finished, and print its line."""
    output = given.folder / form
    if (output / "finished.json").exists():
        print((output / "finished.json").read_text(encoding="utf-8"), flush=True)
        return
    job = TrainingJob(
        "smollm2-135m",
        output,
        answer_tokens=given.answer_tokens,
        drafter=form_named(form)(),
        training=TrainOptions(draft_length=DRAFTS, epochs=1000, evaluations=1, seed=given.seed),
    )
    run, spent = write(plan(job)), Spent()
    steps, last, found = 0, time.monotonic(), dict[str, float]()
    for event in fit(run, passed=lambda: spent.seconds / (60 * given.minutes)):
        if isinstance(event, Step):
            steps, spent.seconds = event.step, spent.seconds + time.monotonic() - last
            print(f"{form}: step {steps}, {spent.seconds:.0f} s", flush=True)
        elif isinstance(event, Evaluation):
            shown = event.quality.tokens_per_step.items()
            found = {str(width): round(value, 3) for width, value in shown}
            print(f"{form}: {found}", flush=True)
        last = time.monotonic()
    line = json.dumps(
        {"form": form, "seconds": round(spent.seconds), "steps": steps,
         "positions_per_second": round(steps * job.training.batch / spent.seconds),
         "held_out": found}
    )  # fmt: skip
    (output / "finished.json").write_text(line, encoding="utf-8")
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--answer-tokens", type=int, default=80_000)
    parser.add_argument("--form", nargs="+", choices=[f.form for f in FORMS], default=COMPARED)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for form in given.form:
        compare(given, form)


if __name__ == "__main__":
    main()
