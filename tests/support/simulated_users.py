"""Two simulated users for `learn`, run manually: one asks for sums, one for small Python functions.

    python tests/support/simulated_users.py FOLDER --math train_prompts.jsonl --mt-bench FILE

The user of sums asks the questions of FILE whose `source` begins with gsm8k; the other one asks for
functions that are made from templates here. No question is asked twice, and the last 40 of each
user are never learned from.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

ASKED_LATER = 40

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
    """Return the questions of GSM8K in a file, in random order, each once."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    asked = [row["prompt"] for row in rows if row["source"].startswith("gsm8k")]
    random.Random(0).shuffle(asked)
    return list(dict.fromkeys(asked))
