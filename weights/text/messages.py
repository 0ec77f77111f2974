"""Messages of a conversation in OpenAI's format, checked, as chat templates take them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from redrafter_mlx.errors import BadInputError


def check_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
    """Return the messages with string contents, and arguments of tool calls as objects.

    Each has the strings `role` and `content`; one with `tool_calls`, in OpenAI's format, needs no
    content. Templates may read further fields, which stay. The older `function_call` and the role
    `function` become a tool call and its result, and a result gets the name of its function.

    Raises BadInputError for anything else, and if there are no messages.
    """
    if not messages:
        raise BadInputError("there are no messages to answer")
    checked = [_check(message) for message in _with_tool_calls(messages)]
    names: dict[str, str] = {}
    for message in checked:
        for call in message.get("tool_calls") or ():
            names[str(call.get("id"))] = call["function"]["name"]
        called = str(message.get("tool_call_id"))
        if message["role"] == "tool" and not message.get("name") and called in names:
            message["name"] = names[called]
    return checked


def check_continued(last: Mapping[str, Any], add_generation_prompt: bool) -> None:
    """Raise BadInputError unless an answer can continue the last message."""
    if add_generation_prompt:
        raise BadInputError(
            "continue_final_message: add_generation_prompt starts another message; leave one out"
        )
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise BadInputError(
            "continue_final_message: the last message must be text of the assistant"
        )


def _with_tool_calls(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return the messages with function calls and their results as tool calls and theirs."""
    read, called = list[dict[str, object]](), ""
    for number, given in enumerate(messages):
        if not isinstance(given, Mapping):
            raise BadInputError(f"message {given!r:.80}; give a role and a content, both strings")
        message = dict(given)
        call = message.pop("function_call", None)
        if call is not None and not message.get("tool_calls"):
            called = f"call{number:05}"  # nine letters and digits, as Mistral's templates require
            message["tool_calls"] = [{"id": called, "type": "function", "function": call}]
        if message.get("role") == "function":
            message |= {"role": "tool", "tool_call_id": called}
        read.append(message)
    return read


def _check(message: Mapping[str, object]) -> dict[str, Any]:
    checked = dict(message)
    if checked.get("tool_calls"):
        checked["content"] = checked.get("content") or ""
        checked["tool_calls"] = _checked_calls(checked["tool_calls"])
    role, content = checked.get("role"), checked.get("content")
    if not isinstance(content, str) or not isinstance(role, str) or not re.fullmatch(r"\w+", role):
        raise BadInputError(f"message {message!r:.80}; give a role and a content, both strings")
    return checked


def _checked_calls(calls: object) -> list[dict[str, object]]:
    """Return tool calls with their arguments as objects, as templates require.

    A model may have written arguments that are no JSON object; they are left out, so that the
    conversation can go on.
    """
    checked = []
    for call in calls if isinstance(calls, list) else [calls]:
        outer = dict(call) if isinstance(call, Mapping) else {}
        function = outer.get("function")
        function = dict(function) if isinstance(function, Mapping) else {}
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _object(arguments)
        if not isinstance(function.get("name"), str) or not isinstance(arguments, Mapping):
            raise BadInputError(
                f"tool call {call!r:.80}; give a function with a name and arguments, a JSON object"
            )
        checked.append({**outer, "function": {**function, "arguments": arguments}})
    return checked


def _object(text: str) -> Mapping[str, object]:
    """Return the JSON object in a text; an empty one if it is anything else, or not text."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(read := json.loads(text), dict):
            all_text(read).encode()  # an escape may stand for half a surrogate pair
            return read
    return {}


def check_text(text: str, what: str) -> None:
    """Raise BadInputError for half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInputError(f"{what} is not text: {error.reason} at {error.start}") from None


def all_text(given: object) -> str:
    """Return every string in messages and tools, joined by newlines."""
    pending, found = [given], []
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, Mapping):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            pending += value
    return "\n".join(found)
