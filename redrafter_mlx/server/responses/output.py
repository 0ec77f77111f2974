"""The items of an answer in the Responses API, and the events with which they grow."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from redrafter_mlx.server.answers.sse import Json
from redrafter_mlx.server.responses.items import encrypted
from redrafter_mlx.server.responses.tools import ToolSet
from redrafter_mlx.weights.text.markup import Delta, ToolCall

Kind = Literal["reasoning", "message"]

_PARTS: dict[Kind, Json] = {
    "reasoning": {"type": "reasoning_text"},
    "message": {"type": "output_text", "annotations": []},
}
_EVENTS: dict[Kind, str] = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
}


@dataclass
class _Open:
    """The item that is being written, its text so far, and log-probabilities of its tokens."""

    kind: Kind
    id: str
    text: str = ""
    logprobs: list[Json] = field(default_factory=list)

    def item(self, status: str, content: list[Json]) -> Json:
        item: Json = {"id": self.id, "type": self.kind, "status": status, "content": content}
        more: Json = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return item | more

    @property
    def part(self) -> Json:
        part = {**_PARTS[self.kind], "text": self.text}
        return {**part, "logprobs": [*self.logprobs]} if self.kind == "message" else part


class Output:
    """Writes the items of one answer, one after the other.

    items: those that are complete
    """

    def __init__(self, tools: ToolSet, *, encrypts: bool) -> None:
        """`encrypts`: whether reasoning has `encrypted_content`, too."""
        self._tools, self._encrypts = tools, encrypts
        self.items: list[Json] = []
        self._open: _Open | None = None

    def take(self, delta: Delta, logprobs: list[Json]) -> Iterator[Json]:
        """Take a part of the answer; yield its events. `logprobs` of a text alone are reported."""
        if delta.tool_call is not None:
            yield from self.close("completed")
            yield from self._call(delta.tool_call)
        if delta.reasoning:
            yield from self._write("reasoning", delta.reasoning, [])
        if delta.content:
            yield from self._write("message", delta.content, logprobs)

    def close(self, status: str) -> Iterator[Json]:
        """Complete the item that is being written, if there is one."""
        if (one := self._open) is None:
            return
        self._open = None
        at: Json = {"item_id": one.id, "output_index": len(self.items)}
        inside: Json = {**at, "content_index": 0}
        done: Json = {**inside, "text": one.text}
        if one.kind == "message":
            done["logprobs"] = one.logprobs
        yield {"type": f"{_EVENTS[one.kind]}.done", **done}
        yield {"type": "response.content_part.done", **inside, "part": one.part}
        item = one.item(status, [one.part])
        if one.kind == "reasoning" and self._encrypts:
            item["encrypted_content"] = encrypted(one.text)
        yield from self._done(item)

    def finish(self, status: str, logprobs: list[Json]) -> Iterator[Json]:
        """Complete the last item, a message if there is none, with the last tokens' `logprobs`."""
        if self._open is None and not self.items:
            yield from self._begin("message")
        if logprobs and self._open is not None and self._open.kind == "message":
            yield from self._write("message", "", logprobs)
        yield from self.close(status)

    def _write(self, kind: Kind, text: str, logprobs: list[Json]) -> Iterator[Json]:
        if self._open is None or self._open.kind != kind:
            yield from self.close("completed")
            yield from self._begin(kind)
        assert self._open is not None
        self._open.text += text
        self._open.logprobs += logprobs
        more: Json = {"logprobs": logprobs} if kind == "message" else {}
        yield {
            "type": f"{_EVENTS[kind]}.delta", "item_id": self._open.id,
            "output_index": len(self.items), "content_index": 0, "delta": text, **more,
        }  # fmt: skip

    def _begin(self, kind: Kind) -> Iterator[Json]:
        prefix = "msg" if kind == "message" else "rs"
        self._open = one = _Open(kind, f"{prefix}_{uuid.uuid4().hex}")
        at = {"output_index": len(self.items)}
        yield {"type": "response.output_item.added", **at, "item": one.item("in_progress", [])}
        inside = {"item_id": one.id, **at, "content_index": 0}
        yield {"type": "response.content_part.added", **inside, "part": one.part}

    def _call(self, call: ToolCall) -> Iterator[Json]:
        item = self._tools.item(call, uuid.uuid4().hex)
        field, event = "arguments", "response.function_call_arguments"
        if item["type"] == "custom_tool_call":
            field, event = "input", "response.custom_tool_call_input"
        at: Json = {"output_index": len(self.items)}
        begun = {**item, "status": "in_progress", field: ""}
        yield {"type": "response.output_item.added", **at, "item": begun}
        at["item_id"] = item["id"]
        yield {"type": f"{event}.delta", **at, "delta": item[field]}
        yield {"type": f"{event}.done", **at, "name": item["name"], field: item[field]}
        yield from self._done({**item, "status": "completed"})

    def _done(self, item: Json) -> Iterator[Json]:
        yield {"type": "response.output_item.done", "output_index": len(self.items), "item": item}
        self.items.append(item)
