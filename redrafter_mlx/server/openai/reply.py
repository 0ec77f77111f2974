"""Common part of the endpoints' replies: one request, its answers, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, Generic, TypeVar

from redrafter_mlx.decoding.constraint import Constraint
from redrafter_mlx.engine.request import Request
from redrafter_mlx.server.answering import Emitted
from redrafter_mlx.server.api_error import blamed_on
from redrafter_mlx.server.hosting import Hosted
from redrafter_mlx.server.openai.schemas import GenerationRequest
from redrafter_mlx.server.record import Record, own_fields
from redrafter_mlx.server.sse import Json

R = TypeVar("R", bound=GenerationRequest)

_UNLIMITED = 4096
"""Maximum number of tokens of an answer if neither the request nor the model sets a limit."""


class Reply(ABC, Generic[R]):
    """The reply to one request: it takes what steps emit and returns chunks, or the whole reply.

    requests: of the answers to generate
    records:  of these answers, in the same order
    alternatives: number of likeliest tokens to report with each token, if any are reported
    """

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, asked: R, hosted: Hosted, arrived: float) -> None:
        """Raises ApiError if the model cannot do what the request asks.

        arrived: when the request came, by `time.perf_counter`
        """
        self._asked, self._hosted = asked, hosted
        self._id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self.requests = self._plan()
        self.records = [Record(arrived) for _ in self.requests]
        self.alternatives = asked.alternatives or 0

    @property
    def shows_own_fields(self) -> bool:
        """Whether chunks hold `x_redrafter`."""
        return self._asked.x_redrafter is not None

    @abstractmethod
    def _plan(self) -> list[Request]:
        """Return the requests of the answers to generate."""

    @abstractmethod
    def _choices(self, emitted: Emitted) -> list[Json]:
        """Take what a step emitted; return the entries of `choices` that a stream shows for it."""

    @abstractmethod
    def _choice(self, answer: int) -> Json:
        """Return an entry of `choices` without content."""

    @abstractmethod
    def _whole_choice(self, answer: int) -> Json:
        """Return the entry of a whole answer."""

    def opening(self) -> Iterable[Json]:
        """Return the chunks to send before anything is emitted."""
        return ()

    def add(self, emitted: Emitted) -> list[Json]:
        """Take what a step emitted; return the chunks that a stream shows for it."""
        record = self.records[emitted.answer]
        record.add(emitted)
        chunks = [self._chunk(choice) for choice in self._choices(emitted)]
        if self.shows_own_fields:
            chunks = chunks or [self._chunk(self._choice(emitted.answer))]
            chunks[0]["x_redrafter"] = own_fields(emitted)
        if (reason := self.finish_reason(emitted.answer)) is not None:
            choice = {**self._choice(emitted.answer), "finish_reason": reason}
            chunks.append({**self._chunk(choice), "timings": record.timings})
        return chunks

    def reading(self, answer: int, read: int, total: int) -> Json:
        """Return a chunk with the prefill progress of an answer's prompt."""
        own = {"prefill": {"read": read, "total": total}}
        return {**self._chunk(self._choice(answer)), "x_redrafter": own}

    def silence(self) -> Json:
        return self._chunk(self._choice(0))

    def closing(self) -> Iterable[Json]:
        """Yield the chunks to send after all answers have ended."""
        if self._asked.stream_options.include_usage:
            yield {**self._chunk(None), "usage": self._usage}

    def whole(self) -> Json:
        return {
            **self._head(self.object_name),
            "choices": [self._whole_choice(i) for i in range(len(self.records))],
            "usage": self._usage,
            "timings": self.records[0].timings,
        }

    def _chunk(self, choice: Json | None) -> Json:
        chunk = {**self._head(self.chunk_name), "choices": [] if choice is None else [choice]}
        return {**chunk, "usage": None} if self._asked.stream_options.include_usage else chunk

    def _head(self, name: str) -> Json:
        return {
            "id": self._id,
            "object": name,
            "created": self._created,
            "model": self._hosted.name,
        }

    @property
    def _usage(self) -> Json:
        # A prompt counts once, however many answers it has; for the second answer it is cached.
        first = slice(None, None, self._asked.n)
        completion = sum(record.last.generation_tokens for record in self.records)
        prompt = sum(len(request.prompt) for request in self.requests[first])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(record.last.cached_tokens for record in self.records[first])
            },
        }

    def finish_reason(self, answer: int) -> str | None:
        """Return why an answer ended, in the API's terms; None if it has not ended."""
        return self.records[answer].last.finish_reason

    def _requests(
        self,
        prompt: tuple[int, ...],
        max_tokens: int | None,
        constraint: Callable[[], Constraint | None] = lambda: None,
    ) -> list[Request]:
        """Return the requests of the `n` answers to one prompt.

        Args:
          constraint: called once per answer, for its constraint
        """
        model, asked = self._hosted.model, self._asked
        most = model.prompts.room_for(prompt, max_tokens or model.context_length or _UNLIMITED)
        requests = []
        for number in range(asked.n):
            options = asked.options(number, most)
            with blamed_on("logit_bias"):  # other options were checked with the request
                options = model.chosen_options(options, {})
            requests.append(Request(prompt, options, constraint()))
        return requests

    def _token_bytes(self, token: int, text: str) -> bytes | None:
        """Return the bytes of a token with this text; None if they cannot be known."""
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        return self._hosted.grammars.bytes_of(token)  # it is part of a character

    def _token_text(self, token: int) -> str:
        return self._hosted.model.token_text.of([token])
