"""Questions to measure with: our own, and those of the public files people have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from redrafter_mlx.errors import BadInputError

_TEXT_KEYS = ("prompt", "question", "instruction", "text")


@dataclass(frozen=True)
class Question:
    """The first turn of a conversation, and what kind it is ("" where a file does not say)."""

    text: str
    category: str = ""


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
"""Two for each of MT-Bench's eight categories; written for this project."""


def read_questions(path: str | Path) -> list[Question]:
    """The questions of a file: MT-Bench or Spec-Bench (`turns`), Alpaca, JSONL, or plain lines.

    Raises:
      BadInputError: naming the file and the line
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInputError(f"{path} is not UTF-8 text") from None
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise BadInputError(f"{path} holds no question")
    if not numbered[0][1].lstrip().startswith("{"):
        return [Question(line.strip()) for _, line in numbered]
    return [_from_json(f"{path}, line {n}", line) for n, line in numbered]


def _from_json(where: str, line: str) -> Question:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInputError(f"{where} is not JSON: {error.msg}") from None
    if not isinstance(row, dict):
        raise BadInputError(f"{where} is not a JSON object")
    turns = row.get("turns")
    texts = turns if isinstance(turns, list) else [row[k] for k in _TEXT_KEYS if k in row]
    if not texts or not isinstance(texts[0], str) or not texts[0].strip():
        keys = ", ".join(("turns", *_TEXT_KEYS))
        raise BadInputError(f"{where} holds no question; one of {keys} should")
    more = row.get("input")
    text = f"{texts[0]}\n\n{more}" if isinstance(more, str) and more.strip() else texts[0]
    category = row.get("category")
    return Question(text, category if isinstance(category, str) else "")
