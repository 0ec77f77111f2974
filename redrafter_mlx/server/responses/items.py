"""The items of a conversation in the Responses API, as messages for a chat template."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any

from redrafter_mlx.server.requests.texts import MessageList, refuse, string_of, text_of
from redrafter_mlx.server.responses.tools import ToolSet

_TEXTS = ("input_text", "output_text", "text", "refusal")
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}

_TRACES = (
    "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call",
    "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "tool_search_call",
    "tool_search_output",
)  # fmt: skip
"""Items of tools that a host runs itself: they show a model nothing, and are left out."""

_OURS = "redrafter-mlx:"
"""Begins `encrypted_content` of this server: it keeps no secret, and no client reads it."""


def encrypted(reasoning: str) -> str:
    """Return reasoning as `encrypted_content`, which a client sends back."""
    return _OURS + base64.b64encode(reasoning.encode()).decode()


def messages_of(
    given: str | list[dict[str, Any]], instructions: str | None, tools: ToolSet
) -> list[dict[str, Any]]:
    """Return the messages of a request; raises ApiError naming an item that cannot be read."""
    found = MessageList()
    if instructions:
        found.add("system", instructions)
    if isinstance(given, str):
        found.add("user", given)
        return found.messages
    for number, item in enumerate(given):
        kind, where = str(item.get("type") or "message"), f"input.{number}"
        if kind in _TRACES:
            continue
        if kind not in _READERS:
            raise refuse(where, f"an item of type {kind!r:.40} is not supported")
        _READERS[kind](found, item, where, tools)
    return found.messages


def _message(found: MessageList, item: Mapping[str, Any], where: str, _: ToolSet) -> None:
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise refuse(f"{where}.role", f"{item.get('role')!r:.40}; choose {', '.join(_ROLES)}")
    text = text_of(item.get("content"), _TEXTS, f"{where}.content")
    if role == "assistant":
        found.add_text(text)
    else:
        found.add(role, text)


def _reasoning(found: MessageList, item: Mapping[str, Any], where: str, _: ToolSet) -> None:
    text = text_of(item.get("content") or "", ("reasoning_text", "text"), f"{where}.content")
    text = text or _decrypted(item.get("encrypted_content"))
    summary = text_of(item.get("summary") or "", ("summary_text",), f"{where}.summary")
    if text or summary:
        found.add_reasoning(text or summary)


def _decrypted(given: object) -> str:
    """Return the reasoning in `encrypted_content` of this server; another's is empty."""
    if not isinstance(given, str) or not given.startswith(_OURS):
        return ""
    try:
        return base64.b64decode(given.removeprefix(_OURS), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _call(found: MessageList, item: Mapping[str, Any], where: str, tools: ToolSet) -> None:
    name = tools.shown_name(string_of(item, "name", where), item.get("namespace"))
    custom = item["type"] == "custom_tool_call"
    given: object = string_of(item, "input" if custom else "arguments", where)
    found.add_call(_call_id(item, where), name, {"input": given} if custom else given)


def _shell_call(found: MessageList, item: Mapping[str, Any], where: str, _: ToolSet) -> None:
    action = item.get("action")
    if not isinstance(action, Mapping):
        raise refuse(f"{where}.action", "give an object")
    found.add_call(_call_id(item, where), "local_shell", dict(action))


def _output(found: MessageList, item: Mapping[str, Any], where: str, _: ToolSet) -> None:
    found.add_result(_call_id(item, where), text_of(item.get("output"), _TEXTS, f"{where}.output"))


def _call_id(item: Mapping[str, Any], where: str) -> str:
    return string_of(item, "call_id" if "call_id" in item else "id", where)


_READERS: Mapping[str, Callable[[MessageList, Mapping[str, Any], str, ToolSet], None]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "custom_tool_call": _call,
    "local_shell_call": _shell_call,
    "function_call_output": _output,
    "custom_tool_call_output": _output,
    "local_shell_call_output": _output,
}
