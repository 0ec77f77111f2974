"""Messages for chat templates that want one system message first, and turns that alternate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redrafter_mlx.errors import BadInputError

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], list[int]]

_INSTRUCTION = "<system>\n{}\n</system>"
"""How an instruction reads that becomes part of what the user writes."""


def render_turns(render: Render, messages: Messages) -> list[int]:
    """Return the prompt of a conversation, with its messages joined if the template needs that.

    Coding agents write several system messages, some of them late, and several messages of the user
    in a row. Templates may refuse these, or leave out what they do not expect.

    Raises BadInputError if the template refuses every form.
    """
    late = any(m["role"] == "system" for m in messages[1:])
    refusal: BadInputError | None = None
    if not late or _shows_late_instructions(render):
        try:
            return render(messages)
        except BadInputError as error:
            refusal = error
    for joined in (_joined(messages), _joined(_without_system(messages))):
        try:
            return render(joined)
        except BadInputError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _shows_late_instructions(render: Render) -> bool:
    """Whether a chat template accepts system messages after the first message, and shows them."""
    turns = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]
    try:
        return render([*turns[:3], turns[0], turns[3]]) != render(turns)
    except BadInputError:
        return False


def _without_system(messages: Messages) -> list[Mapping[str, Any]]:
    """Return the messages with a first one of the user instead of the system's."""
    first, *rest = messages
    return [_of_user(first) if first["role"] == "system" else first, *rest]


def _joined(messages: Messages) -> list[Mapping[str, Any]]:
    """Return messages of which one is the system's, the first, and no two of the user follow."""
    joined: list[Mapping[str, Any]] = []
    for message in messages:
        instructs = message["role"] == "system"
        if instructs and any(before["role"] != "system" for before in joined):
            message = _of_user(message)
        before = joined[-1] if joined else None
        if before is not None and before["role"] == message["role"] and _is_text(message):
            content = f"{before['content']}\n\n{message['content']}"
            joined[-1] = {**before, "content": content}
        else:
            joined.append(message)
    return joined


def _of_user(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"role": "user", "content": _INSTRUCTION.format(message["content"])}


def _is_text(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "user")
