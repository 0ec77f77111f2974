"""The blocks of an answer in the Messages API, and the events with which they grow."""

from __future__ import annotations

import json
from collections.abc import Iterator

from redrafter_mlx.server.answers.sse import Json
from redrafter_mlx.weights.text.markup import Delta, ToolCall

_SIGNATURE = "redrafter-mlx"
"""Signs thinking, which clients send back unchanged: there is nothing to check."""


class Blocks:
    """Writes the blocks of one answer, one after the other.

    whole: those that are complete
    """

    def __init__(self) -> None:
        self.whole: list[Json] = []
        self._open: Json | None = None

    def take(self, delta: Delta) -> Iterator[Json]:
        """Take a part of the answer; yield its events."""
        if delta.tool_call is not None:
            yield from self._call(delta.tool_call)
        if delta.reasoning:
            yield from self._write("thinking", delta.reasoning)
        if delta.content:
            yield from self._write("text", delta.content)

    def finish(self) -> Iterator[Json]:
        """Complete the block that is being written, if there is one."""
        if (block := self._open) is None:
            return
        self._open = None
        if block["type"] == "thinking":
            block["signature"] = _SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        yield {"type": "content_block_stop", "index": len(self.whole)}
        self.whole.append(block)

    def _write(self, kind: str, text: str) -> Iterator[Json]:
        if self._open is None or self._open["type"] != kind:
            yield from self.finish()
            empty = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, kind: "", **empty})
        assert self._open is not None
        self._open[kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: ToolCall) -> Iterator[Json]:
        yield from self.finish()
        yield from self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        assert self._open is not None
        self._open["input"] = json.loads(call.arguments)
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        yield from self.finish()

    def _begin(self, block: Json) -> Iterator[Json]:
        self._open = block
        yield {"type": "content_block_start", "index": len(self.whole), "content_block": {**block}}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self.whole), "delta": delta}
