"""A conversation as a JSON file: written atomically, and checked before it is used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from redrafter_mlx.cli.options import describe_kinds, kinds_of_option, option_names
from redrafter_mlx.cli.terminal import check_text
from redrafter_mlx.config import GenerationOptions, refuse_unknown_keys
from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.runtime.atomic_write import write_private_text
from redrafter_mlx.runtime.json_file import read_object

_KIND = "redrafter-mlx chat"
_ROLES = ("user", "assistant")


@dataclass(frozen=True)
class SavedChat:
    """The content of a file."""

    model: str | None
    system: str | None
    messages: list[dict[str, str]]
    options: GenerationOptions = field(default_factory=GenerationOptions)


def write_chat(path: Path, chat: SavedChat) -> None:
    """Write a conversation; an earlier one is replaced, any other file is not.

    Raises BadInputError where that cannot be done; the file is then as it was.
    """
    try:
        if path.exists() and not _is_chat(path):
            raise BadInputError(f"{path} is not a saved chat; choose another name")
        if not path.parent.is_dir():
            raise BadInputError(f"there is no folder {path.parent}; create it first")
        options = {name: getattr(chat.options, name) for name in option_names()}
        content = {"kind": _KIND, **asdict(chat), "options": options}
        write_private_text(path.resolve(), json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise BadInputError(
            f"cannot write {path}: {error.strerror or error}; choose another place"
        ) from None


def read_chat(path: Path, base: GenerationOptions) -> SavedChat:
    """A conversation from a file, its options on top of `base`.

    Raises BadInputError naming the file and what is wrong with it.
    """
    try:
        return _checked(read_object(path), base)
    except FileNotFoundError:
        raise BadInputError(f"cannot load {path}: No such file") from None
    except (BadInputError, DamagedFileError) as error:
        raise BadInputError(f"cannot load {path}: {error}") from None


def _checked(content: dict[str, object], base: GenerationOptions) -> SavedChat:
    if content.get("kind") != _KIND:
        raise BadInputError("it is not a chat that /save wrote")
    refuse_unknown_keys(content, ["kind", "model", "system", "messages", "options"], "key")
    return SavedChat(
        model=_text_or_none("model", content.get("model")),
        system=_text_or_none("system", content.get("system")),
        messages=_messages(content.get("messages")),
        options=_options(content.get("options", {}), base),
    )


def _options(given: object, base: GenerationOptions) -> GenerationOptions:
    """`base` with what the file says."""
    if not isinstance(given, dict):
        raise BadInputError("options is not a JSON object")
    refuse_unknown_keys(given, option_names(), "option")
    return base.updated({name: _option(name, value) for name, value in given.items()})


def _option(name: str, value: object) -> object:
    kinds = kinds_of_option(name)
    if kinds == (tuple,):
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return tuple(check_text(name, v) for v in value)
    elif type(value) in kinds or (float in kinds and type(value) is int):
        return value
    raise BadInputError(f"{name} is {value!r}; it must be {describe_kinds(kinds)}")


def _messages(given: object) -> list[dict[str, str]]:
    """Turns of user and assistant, one after the other."""
    if not isinstance(given, list):
        raise BadInputError("messages is not a list")
    if len(given) % 2:
        raise BadInputError(f"messages holds {len(given)}; the last one has no answer")
    return [_message(i, message) for i, message in enumerate(given)]


def _message(i: int, given: object) -> dict[str, str]:
    role = _ROLES[i % 2]
    if not isinstance(given, dict) or set(given) != {"role", "content"}:
        raise BadInputError(f"message {i + 1} is not an object of role and content")
    if given["role"] != role:
        raise BadInputError(f"message {i + 1} has role {given['role']!r}; it must be {role!r}")
    content = given["content"]
    if not isinstance(content, str) or (role == "user" and not content.strip()):
        raise BadInputError(f"message {i + 1} has no text")
    return {"role": role, "content": check_text(f"message {i + 1}", content)}


def _text_or_none(name: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return None if value is None else check_text(name, value)
    raise BadInputError(f"{name} is not a string")


def _is_chat(path: Path) -> bool:
    """Whether a file is what `write_chat` writes, or empty."""
    if not path.is_file():
        return False
    if path.stat().st_size == 0:
        return True
    try:
        read_chat(path, GenerationOptions())
    except BadInputError:
        return False
    return True


def shown_turns(messages: Sequence[dict[str, str]]) -> str:
    """`3 turns`."""
    n = len(messages) // 2
    return f"{n} turn{'' if n == 1 else 's'}"
