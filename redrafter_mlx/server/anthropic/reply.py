"""POST /v1/messages and POST /v1/messages/count_tokens"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from redrafter_mlx.server.answers.single_reply import SingleReply
from redrafter_mlx.server.answers.sse import Framing, Json
from redrafter_mlx.server.anthropic.blocks import Blocks
from redrafter_mlx.server.anthropic.messages import continues, messages_of
from redrafter_mlx.server.anthropic.schema import CountRequest, MessagesRequest
from redrafter_mlx.server.anthropic.tools import ToolSet
from redrafter_mlx.server.api_error import ApiError, blamed_on
from redrafter_mlx.server.error_response import anthropic_error
from redrafter_mlx.server.hosting import Hosted
from redrafter_mlx.server.requests.texts import refuse
from redrafter_mlx.structured.plan import OutputPlan, plan_output
from redrafter_mlx.weights.text.markup import Delta

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageReply(SingleReply[MessagesRequest]):
    """The reply to one request: events that say how a message grows, or the whole message."""

    framing = Framing(named=True, end=None)

    def __init__(self, asked: MessagesRequest, hosted: Hosted, arrived: float) -> None:
        super().__init__(asked, hosted, arrived)
        self._blocks, self._id = Blocks(), f"msg_{uuid.uuid4().hex}"

    def _planned(self) -> tuple[OutputPlan, int | None]:
        return plan(self._asked, self._hosted), self._asked.max_tokens

    def opening(self) -> Iterable[Json]:
        usage = self._usage(len(self.requests[0].prompt), 0, 0)
        yield {"type": "message_start", "message": self._message([], usage)}
        yield self.silence()

    def silence(self) -> Json:
        return {"type": "ping"}

    def failed(self, error: ApiError) -> Json:
        return anthropic_error(error)

    def whole(self) -> Json:
        return {**self._message(self._blocks.whole, self._used), **self._stopped}

    def _take(self, delta: Delta) -> Iterable[Json]:
        return self._blocks.take(delta)

    def _end(self) -> Iterable[Json]:
        yield from self._blocks.finish()
        yield {"type": "message_delta", "delta": self._stopped, "usage": self._used}
        yield {"type": "message_stop"}

    def _message(self, content: list[Json], usage: Json) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._hosted.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    @property
    def _stopped(self) -> Json:
        reason, stop = self._parts.finish_reason or "stop", self._parts.stop
        if reason == "stop" and stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}

    @property
    def _used(self) -> Json:
        last = self._record.last
        read = len(self.requests[0].prompt) - last.cached_tokens
        return self._usage(read, last.cached_tokens, last.generation_tokens)

    def _usage(self, read: int, cached: int, written: int) -> Json:
        return {
            "input_tokens": read,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": written,
        }


def count_tokens(asked: CountRequest, hosted: Hosted) -> Json:
    """Return the number of tokens of a request's prompt, even if it is too long for the model."""
    try:
        return {"input_tokens": len(plan(asked, hosted).prompt)}
    except ApiError as error:
        if error.length is None:
            raise
        return {"input_tokens": error.length.tokens}


def plan(asked: CountRequest, hosted: Hosted) -> OutputPlan:
    """Return how a request is answered; raises ApiError naming what cannot be done."""
    messages = messages_of(asked)
    if not messages:
        raise refuse("messages", "there is nothing to answer")
    tools = ToolSet(asked.tools)

    def renamed(param: str) -> str:
        if param.startswith("response_format"):
            end = param.removeprefix("response_format").removeprefix(".json_schema")
            return f"output_config.format{end}"
        return "messages" if param == "continue_final_message" else tools.renamed(param)

    goes_on = continues(messages)
    with blamed_on("messages", renamed):
        return plan_output(
            hosted.model,
            hosted.grammars,
            messages,
            response_format=_chat_format(asked.json_format),
            tools=tools.shown,
            tool_choice=_chat_choice(asked),
            parallel_tool_calls=not asked.tool_choice.disable_parallel_tool_use,
            thinking=asked.reasons,
            thinking_budget=asked.thinking.budget_tokens,
            reasoning_effort=asked.effort,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
        )


def _chat_choice(asked: CountRequest) -> object:
    kind = asked.tool_choice.type
    if kind == "tool":
        return {"type": "function", "function": {"name": asked.tool_choice.name}}
    return {"any": "required"}.get(kind, kind)


def _chat_format(given: Json | None) -> Json | None:
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {**given, "strict": given.get("strict")}}
