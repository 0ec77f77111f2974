"""POST /v1/chat/completions"""

from __future__ import annotations

from collections.abc import Iterable

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.server.answering import Emitted, TokenLogprob, Wanted
from redrafter_mlx.server.api_error import ApiError, unsupported
from redrafter_mlx.server.reply import Reply
from redrafter_mlx.server.schemas import ChatRequest
from redrafter_mlx.server.sse import Json


class ChatReply(Reply):
    """The reply to one chat request."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, asked: ChatRequest, model: Redrafter, name: str) -> None:
        self._chat = asked
        super().__init__(asked, model, name)
        self._texts = [""] * len(self.wanted)
        self._logprobs: list[list[Json]] = [[] for _ in self.wanted]

    def _plan(self) -> list[Wanted]:
        asked = self._chat
        if asked.top_logprobs and not asked.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if asked.response_format != {"type": "text"}:
            raise unsupported("response_format", "ask for the format in a message")
        if asked.tools:
            raise unsupported("tools", "describe them in a message")
        messages = []
        for number, message in enumerate(asked.messages):
            if message.tool_calls or message.role == "tool":
                raise unsupported(f"messages.{number}", "give the text of the conversation")
            role = "system" if message.role == "developer" else message.role
            messages.append({"role": role, "content": message.content})
        most = asked.max_completion_tokens or asked.max_tokens
        alternatives = asked.top_logprobs if asked.logprobs else None
        return self._wanted("messages", messages, 0, most, alternatives)

    def opening(self) -> Iterable[Json]:
        for answer in range(len(self.wanted)):
            yield self._chunk(_choice(answer, {"role": "assistant", "content": ""}))

    def _choices(self, emitted: Emitted) -> list[Json]:
        answer, text = emitted.answer, emitted.text
        self._texts[answer] += text
        choice = _choice(answer, {"content": text})
        if emitted.logprobs is not None:
            pairs = zip(emitted.responses, emitted.logprobs, strict=True)
            entries = [self._entry(response.token, read) for response, read in pairs]
            self._logprobs[answer] += entries
            choice["logprobs"] = {"content": entries, "refusal": None}
        return [choice] if text or emitted.logprobs else []

    def _closing_choice(self, answer: int, finish_reason: str) -> Json:
        return {**_choice(answer, {}), "finish_reason": finish_reason}

    def _empty_choice(self, answer: int) -> Json:
        return _choice(answer, {})

    def _whole_choice(self, answer: int) -> Json:
        logprobs = {"content": self._logprobs[answer], "refusal": None}
        message = {"role": "assistant", "content": self._texts[answer], "refusal": None}
        return {
            "index": answer,
            "message": message,
            "logprobs": logprobs if self._chat.logprobs else None,
            "finish_reason": self.records[answer].last.finish_reason,
        }

    def _entry(self, token: int, read: TokenLogprob) -> Json:
        likeliest = [self._token(t, value) for t, value in read.likeliest]
        return {**self._token(token, read.value), "top_logprobs": likeliest}

    def _token(self, token: int, value: float) -> Json:
        text = self._token_text(token)
        # A token that is part of a character has no text of its own.
        raw = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        return {"token": text, "logprob": max(value, -9999.0), "bytes": raw}


def _choice(answer: int, delta: Json) -> Json:
    return {"index": answer, "delta": delta, "logprobs": None, "finish_reason": None}
