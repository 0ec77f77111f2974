"""The chat's slash commands: one table, one short function each."""

from __future__ import annotations

import codecs
import contextlib
import re
import shlex
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from redrafter_mlx.checks import refuse_unknown_keys
from redrafter_mlx.cli.flag import whole_number
from redrafter_mlx.cli.options import GENERATION
from redrafter_mlx.cli.terminal import check_text
from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.errors import BadInputError, DamagedFileError, meant
from redrafter_mlx.runtime.files.atomic_write import write_private_text
from redrafter_mlx.runtime.files.json_file import read_object, to_json
from redrafter_mlx.runtime.files.paths import human_size
from redrafter_mlx.runtime.words import count

if TYPE_CHECKING:
    from redrafter_mlx.cli.chat.command import Chat

_MAX_BYTES = 4_000_000  # maximum size of a file for /read, about a million tokens

_WORDS = {"on": True, "true": True, "off": False, "false": False, "none": None}


@dataclass(frozen=True)
class Command:
    """A command: its usage, a summary, and the function that gets the rest of the line."""

    usage: str
    summary: str
    run: Callable[[Chat, str], None]

    @property
    def name(self) -> str:
        return self.usage.split()[0]


def run_command(chat: Chat, line: str) -> None:
    """Run a line that begins with `/`; raises BadInputError for an invalid one."""
    name, _, rest = line.strip().partition(" ")
    command = {c.name: c for c in COMMANDS}.get(name)
    if command is None:
        hint = meant(name, [c.name for c in COMMANDS], otherwise="/help lists them")
        raise BadInputError(
            f"unknown command {name}; {hint} (a space in front sends the line as a message)"
        )
    rest = check_text(name, rest.strip())
    if rest and command.usage == name:
        raise BadInputError(f"{name} takes nothing after it, not {rest!r}")
    command.run(chat, rest)


def describe_model(chat: Chat) -> str:
    """Return a short description of the model: name, arithmetic, drafter."""
    source = chat.model.source
    words = [] if source is None else [source.name, source.dtype]
    if source is not None and source.bits:
        words.append(f"{source.bits}-bit")
    drafting = chat.model.drafting if chat.options.draft else None
    if source is None or source.dtype:  # other servers do not say how they decode
        words.append(f"drafting by {drafting}" if drafting else "decoding plainly")
    return ", ".join(filter(None, words))


def _help(chat: Chat, _: str) -> None:
    width = max(len(c.usage) for c in COMMANDS)
    lines = [f"{c.usage:<{width}}  {c.summary}" for c in COMMANDS]
    lines += [
        f'{QUOTED:<{width}}  a message of several lines; lines of only """ may enclose docstrings',
        f"{'Ctrl-C':<{width}}  end the answer, keep its text so far",
        f"{'Ctrl-D':<{width}}  leave",
    ]
    chat.terminal.say("\n".join(lines))


def _clear(chat: Chat, _: str) -> None:
    chat.session.clear()
    chat.terminal.say("conversation cleared; system message and options stay")


def _system(chat: Chat, rest: str) -> None:
    if not rest:
        chat.terminal.say(_shown_system(chat))
        return
    chat.session.system = None if rest == "none" else rest
    chat.terminal.say("from the next message: " + _shown_system(chat))


def _set(chat: Chat, rest: str) -> None:
    name, _, text = rest.partition(" ")
    if not name:
        chat.terminal.say(_shown_options(chat))
        return
    if text.strip() or name not in GENERATION:
        value = parse_setting(name, text.strip(), chat.defaults)
        chat.options = chat.options.updated({name: value})
    chat.terminal.say(_shown_option(chat, name))


def _show(chat: Chat, _: str) -> None:
    note = [chat.model.drafter_note] if chat.model.drafter_note else []
    path = [str(chat.model.source.path)] if chat.model.source is not None else []
    turns = f"conversation {_turns(chat)}"
    rows = [describe_model(chat), *path, *note, _shown_system(chat), turns, _shown_options(chat)]
    chat.terminal.say("\n".join(rows))


def _stats(chat: Chat, rest: str) -> None:
    if rest not in ("on", "off"):
        raise BadInputError(f"/stats takes on or off, not {rest!r}")
    chat.show_statistics = rest == "on"
    chat.terminal.say(f"statistics line {rest}")


def _save(chat: Chat, rest: str) -> None:
    path, session = _path("/save", rest), chat.session
    system = [] if session.system is None else [{"role": "system", "content": session.system}]
    content = {"messages": [*system, *session.messages]}
    try:
        if path.exists():
            _read_chat(path)
        write_private_text(path.resolve(), to_json(content, indent=2) + "\n")
    except OSError as error:
        raise BadInputError(f"cannot write {path}: {error.strerror or error}") from None
    except (DamagedFileError, BadInputError):
        raise BadInputError(
            f"{path} exists and is not a chat that /save wrote; choose another name"
        ) from None
    chat.terminal.say(f"saved {_turns(chat)} to {path}")


def _load(chat: Chat, rest: str) -> None:
    path = _path("/load", rest)
    chat.session.system, chat.session.messages = _read_chat(path)
    chat.terminal.say(f"loaded {_turns(chat)} from {path}")


def _read(chat: Chat, rest: str) -> None:
    if rest == "none":
        chat.files.clear()
        chat.terminal.say("no file goes with the next message")
        return
    path = _path("/read", rest)
    try:
        text = _read_text(path)
        size = count(len(text), "character")
        if chat.count_tokens is not None:
            size = count(chat.count_tokens(text), "token")
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror or error}") from None
    except BadInputError as error:
        raise BadInputError(f"cannot read {path}: {error}") from None
    chat.files[str(path)] = text
    chat.terminal.say(f"with the next message: {path} ({size})")


def _read_text(path: Path) -> str:
    """Return a file's text; raises OSError, or BadInputError for anything but a text."""
    if not stat.S_ISREG(path.stat().st_mode):  # reading a named pipe would never end
        raise BadInputError("it is not a file")
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise BadInputError(f"it has more than {human_size(_MAX_BYTES)}")
    if not content.strip():
        raise BadInputError("it is empty")
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise BadInputError("it is UTF-16 text; convert it to UTF-8")
    if b"\0" in content:
        raise BadInputError("it is not a text")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInputError(f"it is not UTF-8 text (at byte {error.start})") from None


def with_files(files: Mapping[str, str], question: str) -> str:
    """Return a message with files: each one's name, its text in a fenced block, then the question.

    A fence is longer than any in its text.
    """
    blocks = []
    for name, text in files.items():
        fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
        end = "" if text.endswith("\n") else "\n"
        blocks.append(f"{name}\n{fence}\n{text}{end}{fence}\n\n")
    return "".join(blocks) + question


def _read_chat(path: Path) -> tuple[str | None, list[dict[str, str]]]:
    """Read system message and turns from a file of /save; DamagedFileError or BadInputError."""
    try:
        messages = [
            {"role": message["role"], "content": check_text("a message", message["content"])}
            for message in read_object(path)["messages"]  # type: ignore[attr-defined]
        ]
    except FileNotFoundError:
        raise BadInputError(f"cannot load {path}: No such file") from None
    except BadInputError as error:
        raise BadInputError(f"cannot load {path}: {error}") from None
    except (LookupError, TypeError, AttributeError):
        raise BadInputError(f"{path} is not a chat that /save wrote") from None
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
    if [message["role"] for message in messages] != ["user", "assistant"] * (len(messages) // 2):
        raise BadInputError(f"{path} is not a chat: user and assistant do not take turns")
    return system, messages


def _turns(chat: Chat) -> str:
    return count(len(chat.session.messages) // 2, "turn")


def _exit(chat: Chat, _: str) -> None:
    chat.leaving = True


QUOTED = '""" ... """'
COMMANDS = (
    Command("/help", "this list", _help),
    Command("/read FILE", "send a file's text with the next message; none sends none", _read),
    Command("/clear", "start a new conversation", _clear),
    Command("/system TEXT", "set the system message; none removes it, nothing shows it", _system),
    Command("/set NAME VALUE", "set an option; default resets it, nothing shows them", _set),
    Command("/show", "model, drafter and options", _show),
    Command("/stats on|off", "the line after each answer", _stats),
    Command("/save FILE", "write the conversation as JSON", _save),
    Command("/load FILE", "resume a saved conversation", _load),
    Command("/exit", "leave", _exit),
)


def parse_setting(name: str, text: str, defaults: GenerationOptions) -> object:
    """Parse `text` as the value of option `name`; `GenerationOptions` validates it.

    `default` is that of `defaults`; `stop` takes several words, quoted if they contain spaces.
    """
    refuse_unknown_keys({name: text}, [*GENERATION], "option")
    if text == "default":
        return getattr(defaults, name)
    if name == "stop":
        try:
            return () if text == "none" else tuple(shlex.split(text))
        except ValueError:
            raise BadInputError(f"{name} has an open quotation mark: {text}") from None
    if text in _WORDS:
        return _WORDS[text]
    with contextlib.suppress(ValueError):
        return whole_number(text)
    with contextlib.suppress(ValueError):
        return float(text)
    return text


def _path(name: str, rest: str) -> Path:
    """Return the file that a command names, without surrounding quotation marks."""
    quoted = len(rest) > 1 and rest[0] == rest[-1] and rest[0] in "'\""
    text = rest[1:-1] if quoted else rest
    if not text or "\0" in text:
        raise BadInputError(f"{name} needs a file: {name} FILE")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise BadInputError(f"{name} {text}: {error}") from None


def _shown_system(chat: Chat) -> str:
    system = chat.session.system
    return "no system message" if system is None else f"system {system}"


def _shown_options(chat: Chat) -> str:
    return "\n".join(_shown_option(chat, name) for name in GENERATION)


def _shown_option(chat: Chat, name: str) -> str:
    value = getattr(chat.options, name)
    if isinstance(value, tuple):
        shown = shlex.join(value) or "none"
    elif isinstance(value, bool):
        shown = "on" if value else "off"
    else:
        shown = "none" if value is None else str(value)
    return f"{name} {shown}"
