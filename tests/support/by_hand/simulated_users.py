"""Two simulated users for `learn`, run manually: one asks for sums, one for small Python functions.

    python tests/support/by_hand/simulated_users.py FOLDER --sums FILE --mt-bench FILE
        [--answers 300] [--user sums|functions] [--minutes 10 | --steps N] [--seed 0] [--fresh]

FILE of sums is JSONL with a `question` in each line, as GSM-Symbolic and GSM8K publish them (of
GSM8K the test part, which the drafter that ships has not seen). Functions are made from templates
here. The first 40 questions of each user are never learned from: with MT-Bench, they are
what is measured, by beam width, before and after. The last line is JSON. Answers are greedy, of up
to 96 tokens; they and what was learned stay in FOLDER, so that the same command with other minutes
or steps goes on from there. With --fresh no drafter is there first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
from pathlib import Path

import redrafter_mlx  # noqa: F401
from redrafter_mlx.bench.measure.questions import read_questions
from redrafter_mlx.distill.corpus.writing.generation import write_answers
from redrafter_mlx.distill.evaluation.acceptance import measure_quality
from redrafter_mlx.distill.learn import run
from redrafter_mlx.distill.learn.judging import SHAPES
from redrafter_mlx.distill.learn.run import LearnOptions, learn
from redrafter_mlx.distill.learn.texts import read
from redrafter_mlx.drafting.files import installed
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.engine.prompts.prompt import prompt_tokens
from redrafter_mlx.learning.folder import LearningFolder
from redrafter_mlx.learning.kept_texts import KeptText, TextStore
from redrafter_mlx.learning.versions import undo
from redrafter_mlx.loading.target import LoadedTarget, load_target

ASKED_LATER, MAX_TOKENS, TOGETHER = 40, 96, 60

ACTIONS = {
    "list of numbers": (
        "returns the sum of the {} elements", "returns the largest of the {} elements",
        "counts the {} elements", "removes the {} elements",
        "returns the average of the {} elements",
        "returns the indices of the {} elements", "sorts the {} elements in descending order",
        "moves the {} elements to the end", "doubles the {} elements",
        "finds the first of the {} elements",
    ),
    "string": (
        "counts the {} characters", "removes the {} characters",
        "replaces the {} characters with a dash",
        "returns the positions of the {} characters", "checks whether all characters are {}",
        "returns the longest run of {} characters", "moves the {} characters to the front",
        "returns the most frequent of the {} characters",
    ),
    "dictionary": (
        "returns the keys whose values are {}", "removes the entries whose values are {}",
        "counts the values that are {}", "sorts the entries by value and keeps the {} ones",
        "returns the sum of the values that are {}", "inverts the entries whose values are {}",
    ),
    "list of words": (
        "returns the {} words", "counts the {} words", "removes the {} words",
        "sorts the {} words by length",
        "joins the {} words with commas", "returns the first letters of the {} words",
        "groups the {} words by their first letter", "capitalises the {} words",
    ),
}  # fmt: skip
KINDS = {
    "list of numbers": ("even", "odd", "prime", "negative", "positive", "repeated", "unique",
                        "zero", "largest three", "smallest five", "perfect square", "two-digit"),
    "string": ("uppercase", "lowercase", "numeric", "whitespace", "punctuation", "repeated",
               "vowel", "consonant", "non-ASCII", "hexadecimal"),
    "dictionary": ("even", "negative", "None", "strings", "empty lists", "above the average",
                   "unique", "repeated", "larger than ten"),
    "list of words": ("longest", "shortest", "capitalised", "repeated", "palindromic",
                      "five-letter", "plural", "hyphenated", "alphabetically first ten", "unique"),
}  # fmt: skip
FRAMES = (
    "Write a Python function that takes a {} and {}.",
    "Write a small Python function which, given a {}, {}. Include a docstring.",
    "I need a Python function: it takes a {} and {}. Show an example of its use.",
)


def functions() -> list[str]:
    """Return questions for small Python functions, in random order, each once."""
    asked = [
        frame.format(thing, action.format(kind))
        for thing, actions in ACTIONS.items()
        for action, kind, frame in itertools.product(actions, KINDS[thing], FRAMES)
    ]
    random.Random(0).shuffle(asked)
    return list(dict.fromkeys(asked))


def sums(file: Path) -> list[str]:
    """Return the questions in a file, in random order, each once."""
    asked = [json.loads(line)["question"] for line in file.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(asked)
    return list(dict.fromkeys(asked))


def answered(loaded: LoadedTarget, asked: list[str], path: Path) -> list[KeptText]:
    """Return the target's answers to questions; those that a file holds are not written again."""
    target, tokenizer = loaded.target, loaded.tokenizer
    store = TextStore(path)
    prompts = [tuple(prompt_tokens(tokenizer, one, False, target.vocab_size)) for one in asked]
    known = {text.prompt: text for text in store.texts()}
    missing = sorted({*prompts} - {*known}, key=len)
    for at in range(0, len(missing), TOGETHER):
        some = [[*prompt] for prompt in missing[at : at + TOGETHER]]
        eos = set(tokenizer.eos_token_ids)
        for one in write_answers(target, some, eos, MAX_TOKENS, stop_at_loops=False):
            text = KeptText(tuple(one.prompt), tuple(one.answer.tolist()), 0.0, 1.0)
            store.append(text)
            known[text.prompt] = text
        print(f"{path.name}: {min(at + TOGETHER, len(missing))} of {len(missing)}", flush=True)
    return [known[prompt] for prompt in prompts]


def measured(loaded: LoadedTarget, texts: list[KeptText]) -> dict[str, float]:
    """Return tokens/step of the drafter in use along answers, by beam width."""
    folder = run.drafter_in_use(loaded)
    if folder is None:
        return {str(shape.width): 1.0 for shape in SHAPES}
    drafter = DrafterFolder(folder, loaded.source).load(loaded.target)
    target = loaded.target.reading(drafter.features.layers)
    found = measure_quality(drafter, [*read(target, texts)], SHAPES[0].length - 1, SHAPES)
    return {str(width): round(value, 3) for width, value in found.tokens_per_step.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sums", type=Path, required=True)
    parser.add_argument("--mt-bench", type=Path, required=True)
    parser.add_argument("--user", choices=["sums", "functions"], default="sums")
    parser.add_argument("--answers", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true")
    given = parser.parse_args()
    here = given.folder / (given.user + ("-fresh" if given.fresh else ""))
    loaded = load_target("smollm2-135m")
    asked = sums(given.sums) if given.user == "sums" else functions()
    later, asked = asked[:ASKED_LATER], asked[ASKED_LATER : ASKED_LATER + given.answers]
    further = answered(loaded, later, given.folder / f"{given.user}-later")
    questions = [question.text for question in read_questions(given.mt_bench)]
    public = answered(loaded, questions, given.folder / "mt-bench")
    kept = answered(loaded, asked, given.folder / f"{given.user}-asked")
    os.environ["REDRAFTER_CACHE"] = str(here)
    if given.fresh:
        installed.SHIPPED_DRAFTERS = here / "none"
    folder = LearningFolder.of(loaded.source.fingerprint)
    folder.create("smollm2-135m", loaded.source.fingerprint)
    shutil.rmtree(folder.texts, ignore_errors=True)
    store = TextStore(folder.texts)
    for number, text in enumerate(kept):
        store.append(KeptText(text.prompt, text.answer, 0.0, float(number + 1)))
    if folder.current.exists():
        undo(folder)
    before = {"further": measured(loaded, further), "mt-bench": measured(loaded, public)}
    print(f"before {before}", flush=True)
    result = learn(loaded, LearnOptions(given.minutes, given.steps, given.seed), shown)
    assert result is not None
    print(result, flush=True)
    after = {"further": measured(loaded, further), "mt-bench": measured(loaded, public)}
    print(
        json.dumps(
            {"user": given.user, "fresh": given.fresh, "answers": len(kept), "seed": given.seed,
             "steps": result.steps, "seconds": result.seconds, "version": result.version,
             "before": before, "after": after}
        )
    )  # fmt: skip


def shown(stage: str, done: int, total: int) -> None:
    if done % 20 == 0:
        print(f"{stage}: {done} of {total}", flush=True)


if __name__ == "__main__":
    main()
