"""POST /v1/chat/completions"""

from __future__ import annotations

from collections.abc import Iterable

from redrafter_mlx.engine.request import Request
from redrafter_mlx.server.answers.answering import Emitted
from redrafter_mlx.server.answers.logprobs import entries
from redrafter_mlx.server.answers.parts import AnswerParts
from redrafter_mlx.server.answers.sse import Json
from redrafter_mlx.server.api_error import ApiError, blamed_on
from redrafter_mlx.server.openai.reply import OpenAIReply
from redrafter_mlx.server.openai.schemas import ChatRequest
from redrafter_mlx.structured.plan import plan_output
from redrafter_mlx.weights.text.markup import Delta, ToolCall


class ChatReply(OpenAIReply[ChatRequest]):
    """The reply to one chat request."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def _plan(self) -> list[Request]:
        asked, hosted = self._asked, self._hosted
        if asked.top_logprobs and not asked.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        with blamed_on("messages"):
            plan = plan_output(
                hosted.model,
                hosted.grammars,
                [message.given() for message in asked.messages],
                response_format=asked.response_format,
                tools=asked.tools,
                tool_choice=asked.tool_choice,
                parallel_tool_calls=asked.parallel_tool_calls,
                thinking=asked.thinking,
                thinking_budget=asked.thinking_token_budget,
                reasoning_effort=asked.effort,
                add_generation_prompt=asked.starts_message,
                continue_final_message=asked.continue_final_message,
                variables=asked.chat_template_kwargs.model_extra,
            )
            max_tokens = asked.max_completion_tokens or asked.max_tokens
            self._parts = [AnswerParts(plan.parser()) for _ in range(asked.n)]
            self._logprobs: list[list[Json]] = [[] for _ in range(asked.n)]
            return self._requests(plan.prompt, max_tokens, plan.constraint, asked.n)

    def finish_reason(self, answer: int) -> str | None:
        return self._parts[answer].finish_reason

    @property
    def _reasoning_tokens(self) -> int:
        return sum(parts.reasoning_tokens for parts in self._parts)

    def opening(self) -> Iterable[Json]:
        for answer in range(len(self.requests)):
            yield self._chunk(self._choice(answer, {"role": "assistant", "content": ""}))

    def _choices(self, emitted: Emitted) -> list[Json]:
        answer = emitted.answer
        deltas = self._parts[answer].add(emitted)
        choices = [self._choice(answer, _shown(delta)) for delta in deltas]
        if emitted.logprobs is not None:
            new = entries(self._hosted, emitted)
            self._logprobs[answer] += new
            choices = choices or [self._choice(answer)]
            choices[0]["logprobs"] = {"content": new, "refusal": None}
        return choices

    def _choice(self, answer: int, delta: Json | None = None) -> Json:
        return {"index": answer, "delta": delta or {}, "logprobs": None, "finish_reason": None}

    def _whole_choice(self, answer: int) -> Json:
        parts = self._parts[answer]
        message: Json = {"role": "assistant", "content": parts.content, "refusal": None}
        if parts.reasoning:
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            calls = [_call(call) for call in parts.calls]
            message |= {"content": parts.content or None, "tool_calls": calls}
        logprobs = {"content": self._logprobs[answer], "refusal": None}
        return {
            "index": answer,
            "message": message,
            "logprobs": logprobs if self._asked.logprobs else None,
            "finish_reason": self.finish_reason(answer),
        }


def _shown(delta: Delta) -> Json:
    """Return what a stream shows for a part of an answer."""
    shown: Json = {}
    if delta.content:
        shown["content"] = delta.content
    if delta.reasoning:
        shown["reasoning_content"] = delta.reasoning
    if delta.tool_call is not None:
        shown["tool_calls"] = [{"index": delta.tool_call.index, **_call(delta.tool_call)}]
    return shown


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
