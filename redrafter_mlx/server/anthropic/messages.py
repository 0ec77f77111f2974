"""A conversation in the Messages API, as messages for a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from redrafter_mlx.server.anthropic.schema import CountRequest
from redrafter_mlx.server.requests.texts import MessageList, refuse, string_of, text_of

_BILLING = "x-anthropic-billing-header:"
"""Begins the text with which Claude Code starts a prompt: it changes with each version and session,
and says nothing to a model. Left in, no prompt would begin like an earlier one."""

_TEXT = ("text",)


def messages_of(asked: CountRequest) -> list[dict[str, Any]]:
    """Return the messages of a request; raises ApiError naming a block that cannot be read."""
    found = MessageList()
    if system := _system(asked.system, "system"):
        found.add("system", system)
    for number, message in enumerate(asked.messages):
        where = f"messages.{number}.content"
        if message.role == "system":
            found.add("system", _system(message.content, where))
        elif isinstance(message.content, str):
            _add_text(found, message.role, message.content)
        else:
            _add_blocks(found, message.role, message.content, where)
    return found.messages


def continues(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the answer goes on with the last message, which is text of the assistant."""
    last = messages[-1]
    return last["role"] == "assistant" and not last.get("tool_calls") and last["content"] != ""


def _system(given: str | list[dict[str, Any]], where: str) -> str:
    blocks = [{"type": "text", "text": given}] if isinstance(given, str) else given
    texts = [text_of([block], _TEXT, where) for block in blocks]
    return "\n\n".join(text for text in texts if text and not text.startswith(_BILLING))


def _add_text(found: MessageList, role: str, text: str) -> None:
    if role == "assistant":
        found.add_text(text)
    else:
        found.add(role, text)


def _add_blocks(
    found: MessageList, role: str, blocks: Sequence[Mapping[str, Any]], where: str
) -> None:
    texts: list[str] = []

    def write() -> None:
        if texts:
            _add_text(found, role, "\n\n".join(texts))
            texts.clear()

    for number, block in enumerate(blocks):
        here, kind = f"{where}.{number}", block.get("type")
        if kind == "text":
            texts.append(string_of(block, "text", here))
        elif kind == "tool_result" and role == "user":
            write()
            found.add_result(string_of(block, "tool_use_id", here), _result(block, here))
        elif kind == "tool_use" and role == "assistant":
            write()
            name, given = string_of(block, "name", here), block.get("input")
            found.add_call(string_of(block, "id", here), name, given or {})
        elif kind == "thinking" and role == "assistant":
            write()
            found.add_reasoning(string_of(block, "thinking", here))
        elif kind != "redacted_thinking" or role != "assistant":
            raise refuse(here, f"{kind!r:.40} is not supported; this server reads text")
    write()


def _result(block: Mapping[str, Any], where: str) -> str:
    text = text_of(block.get("content") or "", _TEXT, f"{where}.content")
    return text or ("error" if block.get("is_error") else "")
