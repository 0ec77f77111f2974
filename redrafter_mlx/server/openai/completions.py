"""POST /v1/completions"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from redrafter_mlx.engine.request import Request
from redrafter_mlx.server.answers.answering import Emitted
from redrafter_mlx.server.answers.logprobs import token_bytes, token_text
from redrafter_mlx.server.answers.sse import Json
from redrafter_mlx.server.api_error import ApiError, blamed_on
from redrafter_mlx.server.openai.reply import OpenAIReply
from redrafter_mlx.server.openai.schemas import CompletionRequest
from redrafter_mlx.structured.plan import format_constraint

_MAX_TOKENS = 16  # OpenAI's default for this endpoint


class CompletionReply(OpenAIReply[CompletionRequest]):
    """The reply to one completion request: `n` answers to each of its prompts."""

    object_name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = "cmpl"

    def _plan(self) -> list[Request]:
        asked = self._asked
        if asked.echo and asked.logprobs is not None:
            raise ApiError(400, "echo with logprobs is not supported; leave one out", param="echo")
        with blamed_on("response_format"):
            constraint = format_constraint(self._hosted.grammars, asked.response_format)
        max_tokens, requests = asked.max_tokens or _MAX_TOKENS, list[Request]()
        for prompt in asked.prompt:
            with blamed_on("prompt"):
                ids = tuple(self._hosted.model.encode(prompt, raw=isinstance(prompt, str)))
                requests += self._requests(ids, max_tokens, constraint, asked.n)
        self._texts = [""] * len(requests)
        self._logprobs = [_no_logprobs() for _ in requests]
        self._offsets = [0] * len(requests)  # of their next tokens in the text, in characters
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in requests]
        return requests

    def opening(self) -> Iterable[Json]:
        for answer in range(len(self.requests)):
            if echo := self._echo(answer):
                yield self._chunk(self._choice(answer, echo))

    def _choices(self, emitted: Emitted) -> list[Json]:
        answer, text = emitted.answer, emitted.text
        choice = self._choice(answer, text)
        if emitted.logprobs is not None:
            choice["logprobs"] = entries = self._read(emitted)
            for name, values in self._logprobs[answer].items():
                values += entries[name]
        self._texts[answer] += text
        return [choice] if text or emitted.logprobs else []

    def _choice(self, answer: int, text: str = "") -> Json:
        return {"index": answer, "text": text, "logprobs": None, "finish_reason": None}

    def _whole_choice(self, answer: int) -> Json:
        asked = self._asked.logprobs is not None
        return {
            "index": answer,
            "text": self._echo(answer) + self._texts[answer],
            "logprobs": self._logprobs[answer] if asked else None,
            "finish_reason": self.records[answer].last.finish_reason,
        }

    def _echo(self, answer: int) -> str:
        """Return the prompt's text if the request wants it repeated, else an empty string."""
        if not self._asked.echo:
            return ""
        prompt = self._asked.prompt[answer // self._asked.n]
        if isinstance(prompt, str):
            return prompt
        text: str = self._hosted.model.tokenizer.decode(prompt)
        return text

    def _read(self, emitted: Emitted) -> dict[str, list[object]]:
        assert emitted.logprobs is not None
        entries, decoder = _no_logprobs(), self._decoders[emitted.answer]
        for response, read in zip(emitted.responses, emitted.logprobs, strict=True):
            text, raw = self._token(response.token)
            entries["tokens"].append(_name(text, raw))
            entries["token_logprobs"].append(read.value)
            likeliest: dict[str, float] = {}
            for token, value in read.likeliest:  # of tokens with the same text, the better one
                likeliest.setdefault(_name(*self._token(token)), value)
            entries["top_logprobs"].append(likeliest)
            entries["text_offset"].append(self._offsets[emitted.answer])
            # The text itself comes later if a stop string may begin in it.
            self._offsets[emitted.answer] += len(text if raw is None else decoder.decode(raw))
        return entries

    def _token(self, token: int) -> tuple[str, bytes | None]:
        text = token_text(self._hosted, token)
        return text, token_bytes(self._hosted, token, text)


def _name(text: str, raw: bytes | None) -> str:
    """Return a token's text, or its bytes in OpenAI's form if it is part of a character."""
    if raw is None or raw == text.encode():
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _no_logprobs() -> dict[str, list[object]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
