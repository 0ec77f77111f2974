"""The parts of one answer so far: reasoning, text and tool calls."""

from __future__ import annotations

from redrafter_mlx.server.answers.answering import Emitted
from redrafter_mlx.weights.text.markup import Delta, OutputParser, ToolCall


class AnswerParts:
    """Splits one answer into its parts as it is emitted.

    content, reasoning: text so far
    calls:              complete tool calls so far
    reasoning_tokens:   number of tokens of the reasoning, its marks included
    finish_reason:      "stop", "length" or "tool_calls" once the answer has ended
    stop:               the stop string that ended it; None if there was none
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self.content = self.reasoning = ""
        self.calls: list[ToolCall] = []
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stop: str | None = None

    def add(self, emitted: Emitted) -> list[Delta]:
        """Take what a step emitted; return the parts that are certain after it."""
        deltas: list[Delta] = []
        for response in emitted.responses:
            reasons = self._parser.reasons
            deltas += self._parser.feed(response.text)
            self.reasoning_tokens += reasons or self._parser.reasons
        if (reason := emitted.last.finish_reason) is not None:
            deltas += self._parser.finish(cut=reason == "length")
            self.stop = emitted.last.stop
            called = self._parser.called if reason == "stop" else self._parser.ends_in_call
            self.finish_reason = "tool_calls" if called and reason in ("stop", "length") else reason
        deltas = _joined(deltas)
        for delta in deltas:
            self.content += delta.content
            self.reasoning += delta.reasoning
            if delta.tool_call is not None:
                self.calls.append(delta.tool_call)
        return deltas


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Return the parts with neighbours of one kind joined."""
    joined: list[Delta] = []
    for delta in deltas:
        before = joined[-1] if joined else None
        if (
            before is None
            or before.tool_call is not None
            or delta.tool_call is not None
            or bool(before.reasoning) != bool(delta.reasoning)
        ):
            joined.append(delta)
        else:
            joined[-1] = Delta(before.content + delta.content, before.reasoning + delta.reasoning)
    return joined
