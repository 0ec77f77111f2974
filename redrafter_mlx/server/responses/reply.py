"""POST /v1/responses"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable

from redrafter_mlx.server.answers.single_reply import SingleReply
from redrafter_mlx.server.answers.sse import Framing, Json
from redrafter_mlx.server.api_error import ApiError, blamed_on
from redrafter_mlx.server.hosting import Hosted
from redrafter_mlx.server.responses.items import messages_of
from redrafter_mlx.server.responses.output import Output
from redrafter_mlx.server.responses.schema import ENCRYPTED, LOGPROBS, ResponsesRequest
from redrafter_mlx.server.responses.tools import ToolSet
from redrafter_mlx.structured.plan import OutputPlan, plan_output
from redrafter_mlx.weights.text.markup import Delta


class ResponsesReply(SingleReply[ResponsesRequest]):
    """The reply to one request: events that say how a response grows, or the whole response."""

    framing = Framing(named=True, end=None)

    def __init__(self, asked: ResponsesRequest, hosted: Hosted, arrived: float) -> None:
        self._tools = ToolSet(asked.tools)
        super().__init__(asked, hosted, arrived)
        self._output = Output(self._tools, encrypts=ENCRYPTED in asked.include)
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._sent = 0

    def _planned(self) -> tuple[OutputPlan, int | None]:
        asked, hosted = self._asked, self._hosted
        if asked.top_logprobs and asked.alternatives is None:
            raise ApiError(400, f"top_logprobs needs include: [{LOGPROBS!r}]", param="top_logprobs")
        messages = messages_of(asked.input, asked.instructions, self._tools)
        with blamed_on("input", self._renamed):
            plan = plan_output(
                hosted.model,
                hosted.grammars,
                messages,
                response_format=_chat_format(asked.text.format),
                tools=self._tools.usable(asked.tool_choice),
                tool_choice=self._tools.choice(asked.tool_choice),
                parallel_tool_calls=asked.parallel_tool_calls,
                thinking=asked.thinking,
                thinking_budget=asked.thinking_token_budget,
                reasoning_effort=asked.reasoning.effort,
            )
        return plan, asked.max_output_tokens

    def _renamed(self, param: str) -> str:
        for name, own in (("response_format.json_schema", "text.format"),
                          ("response_format", "text.format"), ("messages", "input")):  # fmt: skip
            if param.startswith(name):
                return own + param.removeprefix(name)
        return self._tools.renamed(param)

    def opening(self) -> Iterable[Json]:
        yield self._with_response("response.created", "in_progress")
        yield self._with_response("response.in_progress", "in_progress")

    def silence(self) -> Json:
        return self._with_response("response.in_progress", "in_progress")

    def failed(self, error: ApiError) -> Json:
        code = error.code or ("server_error" if error.status >= 500 else "invalid_prompt")
        failure = {"code": code, "message": error.message}
        return self._with_response("response.failed", "failed", error=failure)

    def whole(self) -> Json:
        return self._response(self._status, usage=self._usage)

    def _take(self, delta: Delta) -> Iterable[Json]:
        return map(self._numbered, self._output.take(delta, self._read_logprobs()))

    def _end(self) -> Iterable[Json]:
        last = self._output.finish(self._status, self._read_logprobs())
        yield from map(self._numbered, last)
        yield self._with_response(f"response.{self._status}", self._status, usage=self._usage)

    @property
    def _status(self) -> str:
        return "incomplete" if self._parts.finish_reason == "length" else "completed"

    def _numbered(self, event: Json) -> Json:
        self._sent += 1
        return {**event, "sequence_number": self._sent - 1}

    def _with_response(self, kind: str, status: str, **changes: object) -> Json:
        return self._numbered({"type": kind, "response": self._response(status, **changes)})

    def _response(self, status: str, **changes: object) -> Json:
        asked = self._asked
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": cut,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata,
            "model": self._hosted.name,
            "output": list(self._output.items),
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.effort, "summary": asked.reasoning.summary},
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": asked.text.format or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools,
            "top_logprobs": asked.top_logprobs,
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None,
            **changes,
        }

    @property
    def _usage(self) -> Json:
        last = self._record.last
        read, written = len(self.requests[0].prompt), last.generation_tokens
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": last.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": self._parts.reasoning_tokens},
            "total_tokens": read + written,
        }


def _chat_format(given: Json | None) -> Json | None:
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if k != "type"}}
