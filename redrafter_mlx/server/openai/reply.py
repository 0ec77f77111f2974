"""Common part of both endpoints' replies: answers are entries of `choices`."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar, TypeVar

from redrafter_mlx.server.answers.answering import Emitted
from redrafter_mlx.server.answers.record import own_fields
from redrafter_mlx.server.answers.reply import Reply
from redrafter_mlx.server.answers.sse import Framing, Json
from redrafter_mlx.server.api_error import ApiError
from redrafter_mlx.server.error_response import openai_error
from redrafter_mlx.server.hosting import Hosted
from redrafter_mlx.server.openai.schemas import OpenAIRequest

Asked = TypeVar("Asked", bound=OpenAIRequest)


class OpenAIReply(Reply[Asked]):
    """The reply to one request: chunks, or one object with all choices."""

    framing = Framing(named=False, end="[DONE]")
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, asked: Asked, hosted: Hosted, arrived: float) -> None:
        super().__init__(asked, hosted, arrived)
        self._id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    @property
    def reports_prefill(self) -> bool:
        return self._asked.x_redrafter is not None

    @abstractmethod
    def _choices(self, emitted: Emitted) -> list[Json]:
        """Take what a step emitted; return the entries of `choices` that a stream shows for it."""

    @abstractmethod
    def _choice(self, answer: int) -> Json:
        """Return an entry of `choices` without content."""

    @abstractmethod
    def _whole_choice(self, answer: int) -> Json:
        """Return the entry of a whole answer."""

    def add(self, emitted: Emitted) -> list[Json]:
        record = self.records[emitted.answer]
        record.add(emitted)
        chunks = [self._chunk(choice) for choice in self._choices(emitted)]
        if self._asked.x_redrafter is not None:
            chunks = chunks or [self._chunk(self._choice(emitted.answer))]
            chunks[0]["x_redrafter"] = own_fields(emitted)
        if (reason := self.finish_reason(emitted.answer)) is not None:
            choice = {**self._choice(emitted.answer), "finish_reason": reason}
            chunks.append({**self._chunk(choice), "timings": record.timings})
        return chunks

    def reading(self, answer: int, read: int, total: int) -> Json:
        own = {"prefill": {"read": read, "total": total}}
        return {**self._chunk(self._choice(answer)), "x_redrafter": own}

    def failed(self, error: ApiError) -> Json:
        return openai_error(error)

    def silence(self) -> Json:
        return self._chunk(self._choice(0))

    def closing(self) -> Iterable[Json]:
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
            "completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
        }

    @property
    def _reasoning_tokens(self) -> int:
        return 0

    def finish_reason(self, answer: int) -> str | None:
        """Return why an answer ended, in the API's terms; None if it has not ended."""
        return self.records[answer].last.finish_reason
