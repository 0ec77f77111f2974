"""Prompts and finished conversations from files in common formats."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files.regular_file import read_regular_text
from redrafter_mlx.runtime.words import count

_MESSAGE_KEYS = ("messages", "conversations")
_TURN_KEYS = ("turns", "prompt", "instruction", "question", "text", "query")
_KNOWN_KEYS = (*_MESSAGE_KEYS, *_TURN_KEYS)
_ANSWER_KEYS = ("response", "output", "answer", "completion", "chosen")
_ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "system": "system",
}
_JSON_NAMES = (".json", ".jsonl", ".ndjson")

_SHOWN = 4  # number of reasons that a line names


PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""What a turn holds instead of a text that its authors' script fetches from the source."""

JSON_LINES = (
    'as JSON lines with pandas: read_parquet(...).to_json(..., orient="records", lines=True); '
    "see docs/guides/measuring.md"
)
"""How to write a Parquet file so that it can be read here."""

PREPARE = (
    "NVIDIA's script fetches them (`python prepare_data.py --dataset speed --config qualitative` "
    "in examples/specdec_bench of github.com/NVIDIA/Model-Optimizer); write the Parquet file that "
    f"it makes {JSON_LINES}"
)


@dataclass(frozen=True)
class Conversation:
    """A user's turns, with the answers if a file has them."""

    turns: tuple[str, ...]
    answers: tuple[str, ...] = ()  # to the first turns; empty if the target is to write them
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


def read_conversations(path: str | Path, unused: Counter[str] | None = None) -> list[Conversation]:
    """Read conversations from JSONL, a JSON array, or plain lines (one prompt per line).

    A row is used up to its first message that cannot be, such as a tool's; `unused` counts those
    rows by reason. Raises BadInputError naming the file, and the line if no row can be used.
    """
    found, first = [], None
    unused = Counter() if unused is None else unused
    for where, row in read_rows(path):
        try:
            conversation, cut = _used(row)
        except BadInputError as error:
            first, conversation, cut = first or f"{where} holds {error}", None, str(error)
        if conversation is not None:
            found.append(conversation)
        if cut is not None:
            unused[cut] += 1
    if not found:
        raise BadInputError(first or f"{path} holds no prompts")
    check_prepared(path, (conversation.turns for conversation in found))
    return found


def describe_unused(path: Path, unused: Counter[str]) -> str:
    """Return a line on the rows of a file that are used in part or not at all."""
    reasons = ", ".join(f"{n:,} with {why}" for why, n in unused.most_common(_SHOWN))
    others = ", ..." if len(unused) > _SHOWN else ""
    return f"{path}: rows used in part or left out: {unused.total():,} ({reasons}{others})"


def conversation_of(row: object, where: str) -> Conversation | None:
    """Return the conversation of a row; None if it does not begin with a user's turn.

    Known objects: MT-Bench and Spec-Bench (`turns`), Alpaca (`instruction`, `input`, `output`),
    ShareGPT (`conversations` of `from`/`value`), OpenAI chat (`messages` of `role`/`content`), and
    `prompt`, `question`, `text` or `query` with an optional `response` or `answer`.

    Raises BadInputError, beginning with `where`, for another object.
    """
    try:
        return _used(row)[0]
    except BadInputError as error:
        raise BadInputError(f"{where} holds {error}") from None


def _used(row: object) -> tuple[Conversation | None, str | None]:
    """Return the conversation of a row as far as it can be used, and why no further.

    Raises BadInputError, with the reason alone, for a row of no known form, or whose text is none.
    """
    conversation, cut = _read(row)
    if conversation is not None:
        texts = (*conversation.turns, *conversation.answers, conversation.system or "")
        try:
            " ".join(texts).encode()
        except UnicodeEncodeError:
            raise BadInputError("half a surrogate pair, which is no text") from None
    return conversation, cut


def _read(row: object) -> tuple[Conversation | None, str | None]:
    if isinstance(row, str):
        return (Conversation((row.strip(),)) if row.strip() else None), None
    if not isinstance(row, dict):
        raise BadInputError("neither text nor a JSON object")
    for key in _MESSAGE_KEYS:
        if isinstance(row.get(key), list):
            return _from_messages(row[key])
    turns = next((turns for k in _TURN_KEYS if (turns := _turns(row.get(k)))), None)
    if turns is None:
        raise BadInputError(f"no prompt under {', '.join(_KNOWN_KEYS)}")
    first, *later = turns
    more = _text(row.get("input"))
    answer = next((text for k in _ANSWER_KEYS if (text := _text(row.get(k)))), None)
    conversation = Conversation(
        (f"{first}\n\n{more}" if more else first, *later),
        (answer,) if answer and not later else (),
        _text(row.get("system")),
    )
    return conversation, None


def read_rows(path: str | Path) -> list[tuple[str, object]]:
    """Return the rows of JSONL, of a JSON array, or of plain lines, each with its place in words.

    Empty lines are left out. A file that begins as JSON does, under a name that is not JSON's, is
    JSON if its first row is. Raises BadInputError naming the file, and the line that is not JSON.
    """
    try:
        text = read_regular_text(Path(path), "utf-8-sig")
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        if error.object.startswith(b"PAR1"):
            raise BadInputError(f"{path} is a Parquet file; write it {JSON_LINES}") from None
        raise BadInputError(f"{path} is not UTF-8 text") from None
    # Only "\n" ends a line: JSON strings may hold the other separators.
    lines = [(f"{path}, line {n}", line) for n, line in enumerate(text.split("\n"), 1)]
    lines = [(where, line) for where, line in lines if line.strip()]
    named = Path(path).suffix.lower() in _JSON_NAMES
    if re.match(r"\s*\[\s*[\]{\"]", text):
        items = _array(str(path), text, named=named)
        if items is not None:
            return [(f"{path}, element {n}", item) for n, item in enumerate(items, 1)]
    elif text.lstrip().startswith("{") and (named or _is_row(lines[0][1])):
        return [(where, _parse(where, line)) for where, line in lines]
    return list(lines)


def _array(where: str, text: str, *, named: bool) -> list[object] | None:
    """Return the elements of a JSON array; None for other text, unless its file is `named` so."""
    try:
        items = _parse(where, text)
    except BadInputError:
        if named:
            raise
        return None
    assert isinstance(items, list)
    return items


def _is_row(line: str) -> bool:
    """Whether a line is a JSON object with a key that is known here."""
    try:
        row = _parse("", line)
    except BadInputError:
        return False
    return isinstance(row, dict) and not row.keys().isdisjoint(_KNOWN_KEYS)


def _parse(where: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # a number may have too many digits
        raise BadInputError(f"{where} is not JSON: {getattr(error, 'msg', error)}") from None


def _from_messages(messages: Sequence[object]) -> tuple[Conversation | None, str | None]:
    system, turns, answers, cut = None, list[str](), list[str](), None
    for message in messages:
        try:
            role, content = _role_and_content(message)
        except BadInputError as error:
            if not turns:
                raise
            cut = str(error)
            break
        if role == "system" and not turns:
            system = content
        elif role == "user" and len(answers) == len(turns):
            turns.append(content)
        elif role == "assistant" and len(answers) == len(turns) - 1:
            answers.append(content)
        else:
            cut = "roles that do not alternate" if turns else "no user's turn at its start"
            break
    return (Conversation(tuple(turns), tuple(answers), system) if turns else None), cut


def _role_and_content(message: object) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        raise BadInputError("a message that is no JSON object")
    given = message.get("role", message.get("from"))
    role, content = _ROLES.get(str(given)), message.get("content", message.get("value"))
    if role is None:
        raise BadInputError(f"a message of the role {given!r:.40}")
    if isinstance(content, list):  # OpenAI's parts of a content
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    if not isinstance(content, str):
        raise BadInputError("a message without a text")
    return role, content


def _turns(value: object) -> list[str]:
    return [*takewhile(_text, value if isinstance(value, list) else [value])]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def check_prepared(path: str | Path, questions: Iterable[Iterable[str]]) -> None:
    """Raise BadInputError if a turn of a file's questions holds the placeholder."""
    missing = sum(any(PLACEHOLDER in turn for turn in turns) for turns in questions)
    if missing:
        raise BadInputError(
            f"{path} has SPEED-Bench's placeholder in {count(missing, 'question')} instead of the "
            f"texts; {PREPARE}"
        )
