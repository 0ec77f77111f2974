"""Prompts and finished conversations from files in common formats."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from redrafter_mlx.errors import BadInputError

_TEXT_KEYS = ("prompt", "instruction", "question", "text", "query")
_ANSWER_KEYS = ("response", "output", "answer", "completion", "chosen")
_ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "system": "system",
}


@dataclass(frozen=True)
class Conversation:
    """A user's turns, with the answers if a file has them.

    answers: answers to the first turns; empty if the target is to write them
    """

    turns: tuple[str, ...]
    answers: tuple[str, ...] = ()
    system: str | None = None

    def messages(self, turn: int, *, answered: bool = False) -> list[dict[str, str]]:
        """Return the conversation up to user turn `turn`, and its answer if there is one."""
        said = [("system", self.system)] if self.system else []
        for user, answer in zip(self.turns[:turn], self.answers, strict=False):
            said += [("user", user), ("assistant", answer)]
        said.append(("user", self.turns[turn]))
        if answered:
            said += [("assistant", answer) for answer in self.answers[turn : turn + 1]]
        return [{"role": role, "content": content} for role, content in said]


def read_conversations(path: str | Path) -> list[Conversation]:
    """Read conversations from JSONL, a JSON array, or plain lines (one prompt per line).

    Raises BadInputError naming the file and the line.
    """
    found = [
        conversation
        for where, row in read_rows(path)
        if (conversation := conversation_of(row, where)) is not None
    ]
    if not found:
        raise BadInputError(f"{path} holds no prompts")
    return found


def conversation_of(row: object, where: str) -> Conversation | None:
    """Return the conversation of a row; None if it does not begin with a user's turn.

    Known objects: MT-Bench and Spec-Bench (`turns`), Alpaca (`instruction`, `input`, `output`),
    ShareGPT (`conversations` of `from`/`value`), OpenAI chat (`messages` of `role`/`content`), and
    `prompt`, `question`, `text` or `query` with an optional `response` or `answer`.

    Raises BadInputError, beginning with `where`, for another object.
    """
    if isinstance(row, str):
        return Conversation((row.strip(),)) if row.strip() else None
    if not isinstance(row, dict):
        raise BadInputError(f"{where} is neither text nor a JSON object")
    for key in ("messages", "conversations"):
        if isinstance(row.get(key), list):
            return _from_messages(row[key], where)
    keys = ("turns", *_TEXT_KEYS)
    turns = next((turns for k in keys if (turns := _turns(row.get(k)))), None)
    if turns is None:
        known = ", ".join(("messages", "conversations", *keys))
        raise BadInputError(f"{where} holds no prompt; one of {known} should")
    first, *later = turns
    more = _text(row.get("input"))
    answer = next((text for k in _ANSWER_KEYS if (text := _text(row.get(k)))), None)
    return Conversation(
        (f"{first}\n\n{more}" if more else first, *later),
        (answer,) if answer and not later else (),
        _text(row.get("system")),
    )


def read_rows(path: str | Path) -> list[tuple[str, object]]:
    """Return the rows of JSONL, of a JSON array, or of plain lines, each with its place in words.

    A row of a plain file is a string. Empty lines are left out. Raises BadInputError naming the
    file, and the line that is not JSON.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BadInputError(f"{path} is not UTF-8 text") from None
    if re.match(r"\s*\[\s*[\]{\"]", text):
        items = _parse(str(path), text)
        assert isinstance(items, list)
        return [(f"{path}, element {n}", item) for n, item in enumerate(items, 1)]
    # Only "\n" ends a line: JSON strings may hold the other separators.
    lines = [(f"{path}, line {n}", line) for n, line in enumerate(text.split("\n"), 1)]
    lines = [(where, line) for where, line in lines if line.strip()]
    if not text.lstrip().startswith("{"):
        return list(lines)
    return [(where, _parse(where, line)) for where, line in lines]


def _parse(where: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # a number may have too many digits
        raise BadInputError(f"{where} is not JSON: {getattr(error, 'msg', error)}") from None


def _from_messages(messages: Sequence[object], where: str) -> Conversation | None:
    system, turns, answers = None, list[str](), list[str]()
    for message in messages:
        role, content = _role_and_content(message, where)
        if role == "system" and not turns:
            system = content
        elif role == "user" and len(answers) == len(turns):
            turns.append(content)
        elif role == "assistant" and len(answers) == len(turns) - 1:
            answers.append(content)
        else:
            break  # the roles no longer alternate
    return Conversation(tuple(turns), tuple(answers), system) if turns else None


def _role_and_content(message: object, where: str) -> tuple[str, str]:
    if isinstance(message, Mapping):
        role = _ROLES.get(str(message.get("role", message.get("from"))))
        content = message.get("content", message.get("value"))
        if role and isinstance(content, str):
            return role, content
    raise BadInputError(f"{where} holds a message without a known role and a text")


def _turns(value: object) -> list[str]:
    """Return a user's turns: one text, or the texts that a list begins with."""
    return [*takewhile(_text, value if isinstance(value, list) else [value])]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value.strip() else None
