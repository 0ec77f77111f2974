"""Benchmark questions: our own, and those of files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from redrafter_mlx.distill.corpus.prompts.conversations import (
    check_prepared,
    conversation_of,
    read_rows,
)
from redrafter_mlx.errors import BadInputError

WHOLE = "all"
"""Category of a row over all questions."""

_ID_KEYS = ("question_id", "prompt_id", "id")
_CATEGORY_KEYS = ("category", "dataset")
"""The first is MT-Bench's and Spec-Bench's, the second AlpacaEval's."""


@dataclass(frozen=True)
class Question:
    """The first turn of a conversation."""

    text: str
    category: str = ""  # "" if the file gives none
    id: int | str | None = None  # as in the file; None if the file gives none
    later: tuple[str, ...] = ()  # the user's later turns

    @property
    def turns(self) -> tuple[str, ...]:
        """All turns of the user."""
        return (self.text, *self.later)


OWN_QUESTIONS = (
    Question("Write a short letter to a friend who is moving to a cold country.", "writing"),
    Question("Describe a market on a rainy morning in five sentences.", "writing"),
    Question("You keep a lighthouse. A lost sailor asks you for the way. Answer.", "roleplay"),
    Question("Play a patient teacher whose pupil believes that the sun is small.", "roleplay"),
    Question("Anna is older than Ben, and Ben is older than Carl. Who is youngest? Explain.",
             "reasoning"),
    Question("A shop opens at nine and closes after eight hours. When is it closed?", "reasoning"),
    Question("A train leaves at 9:40 and arrives at 13:05. How long does it take?", "math"),
    Question("What is 15 percent of 240? Show each step.", "math"),
    Question("Write a Python function that reverses a linked list, with comments.", "coding"),
    Question("Write a SQL query that counts the orders of each customer in 2024.", "coding"),
    Question("List the names, dates and places in this sentence as JSON: Marie met Paul in Lyon "
             "on 3 May 1998.", "extraction"),
    Question("Make a table of the fruits and their prices: apples cost 2, pears 3, plums 5.",
             "extraction"),
    Question("Explain how a heat pump works to somebody who knows a refrigerator.", "stem"),
    Question("Why do leaves turn yellow in autumn?", "stem"),
    Question("What did the printing press change in Europe?", "humanities"),
    Question("Compare the idea of a republic with that of a monarchy.", "humanities"),
)  # fmt: skip
"""Two questions for each of MT-Bench's eight categories, written for this project."""


def read_questions(path: str | Path) -> list[Question]:
    """Read a file of questions, in the formats of `conversation_of`, or plain lines.

    Raises BadInputError naming the file, and the line or element.
    """
    found = [*filter(None, (_question(where, row) for where, row in read_rows(path)))]
    if not found:
        raise BadInputError(f"{path} holds no question")
    check_prepared(path, (question.turns for question in found))
    return found


def choose_questions(
    questions: Sequence[Question], categories: Sequence[str] | None, limit: int | None
) -> list[Question]:
    """Return the questions of `categories` (None: all), at most `limit`, each with an id.

    They are evenly spaced: question files are sorted by category. Raises BadInputError for a
    category that does not occur, a limit below 1, or an id that occurs twice.
    """
    if limit is not None and limit < 1:
        raise BadInputError(f"--limit is {limit}; it must be at least 1")
    known = sorted({q.category for q in questions if q.category})
    for category in categories or ():
        if category not in known:
            there = f"there are: {', '.join(known)}" if known else "these questions have none"
            raise BadInputError(f"--categories holds {category!r}; {there}")
    if WHOLE in known:
        raise BadInputError(
            f"a category is named {WHOLE!r}, like the row of all; name it otherwise"
        )
    given = {q.id for q in questions}
    free = (n for n in count(1) if n not in given)
    numbered = [q if q.id is not None else replace(q, id=next(free)) for q in questions]
    chosen = [q for q in numbered if not categories or q.category in categories]
    if limit is not None and limit < len(chosen):
        chosen = [chosen[i * len(chosen) // limit] for i in range(limit)]
    for number, times in Counter(q.id for q in chosen).items():
        if times > 1:
            raise BadInputError(f"question_id {number!r} occurs twice; give each its own")
    return chosen


def _question(where: str, row: object) -> Question | None:
    conversation = conversation_of(row, where)
    if conversation is None:
        return None
    keys = row if isinstance(row, dict) else {}
    category = next((keys[k] for k in _CATEGORY_KEYS if k in keys), None)
    ids = (keys.get(k) for k in _ID_KEYS)
    number = next((n for n in ids if isinstance(n, (int, str)) and n != ""), None)
    first, *later = conversation.turns
    kind = category if isinstance(category, str) else ""
    return Question(first, kind, number, tuple(later))
