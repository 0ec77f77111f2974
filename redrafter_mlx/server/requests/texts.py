"""Texts and messages of requests whose content is a list of parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from redrafter_mlx.server.api_error import ApiError


def refuse(param: str, why: str) -> ApiError:
    """Return a 400 that names the parameter."""
    return ApiError(400, f"{param}: {why}", param=param)


def string_of(given: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field that must be a string."""
    value = given.get(name)
    if not isinstance(value, str):
        raise refuse(f"{where}.{name}", "give a string")
    return value


def text_of(content: object, kinds: Collection[str], where: str) -> str:
    """Return a string, or parts of these kinds, as one text; ApiError names others, as an image."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse(where, "give a string or a list of parts")
    texts = []
    for number, part in enumerate(content):
        here = f"{where}.{number}"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in kinds:
            raise refuse(here, f"{kind!r:.40} is not supported; this server reads text")
        texts.append(string_of(part, "refusal" if kind == "refusal" else "text", here))
    return "".join(texts)


class MessageList:
    """Messages in OpenAI's chat format, with neighbouring parts of an answer as one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._answer: dict[str, Any] | None = None

    def add(self, role: str, content: str) -> None:
        self._answer = None
        self.messages.append({"role": role, "content": content})

    def add_result(self, call_id: str, content: str) -> None:
        self._answer = None
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def add_text(self, text: str) -> None:
        answer = self._open(begins="tool_calls")
        answer["content"] = "\n\n".join(filter(None, (answer["content"], text)))

    def add_reasoning(self, text: str) -> None:
        """Add the reasoning before an answer."""
        answer = self._open(begins="tool_calls")
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def add_call(self, call_id: str, name: str, arguments: object) -> None:
        """Add a tool call; `arguments` is an object, or its JSON."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._open().setdefault("tool_calls", []).append(call)

    def _open(self, begins: str = "") -> dict[str, Any]:
        """Return the answer that is being read, or a new one if it has the field `begins`."""
        if self._answer is None or begins in self._answer:
            self._answer = {"role": "assistant", "content": ""}
            self.messages.append(self._answer)
        return self._answer
