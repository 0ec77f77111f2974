"""What the endpoints' replies have in common: one request, its answers, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.server.answering import Emitted, Wanted
from redrafter_mlx.server.api_error import ApiError
from redrafter_mlx.server.record import Record, own_fields
from redrafter_mlx.server.schemas import GenerationRequest
from redrafter_mlx.server.sse import Json

_UNLIMITED = 4096
"""Most tokens of an answer where neither the request nor the model names a limit."""


class Reply(ABC):
    """The reply to one request: told what was emitted, it gives chunks, or the whole.

    wanted:  the answers to generate
    records: of those answers, in the same order
    """

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, asked: GenerationRequest, model: Redrafter, name: str) -> None:
        """Raises ApiError for what this model cannot do."""
        self._asked, self._model, self._name = asked, model, name
        self._id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self.wanted = self._plan()
        self.records = [Record() for _ in self.wanted]

    @abstractmethod
    def _plan(self) -> list[Wanted]:
        """The answers to generate."""

    @abstractmethod
    def _choices(self, emitted: Emitted) -> list[Json]:
        """Take what a step emitted; the entries of `choices` that a stream shows for it."""

    @abstractmethod
    def _closing_choice(self, answer: int, finish_reason: str) -> Json:
        """The entry that ends an answer in a stream."""

    @abstractmethod
    def _empty_choice(self, answer: int) -> Json:
        """An entry that says nothing."""

    @abstractmethod
    def _whole_choice(self, answer: int) -> Json:
        """The entry of a whole answer."""

    def opening(self) -> Iterable[Json]:
        """Chunks before anything was emitted."""
        return ()

    def add(self, emitted: Emitted) -> list[Json]:
        """Take what a step emitted; the chunks that a stream shows for it."""
        record = self.records[emitted.answer]
        record.add(emitted)
        chunks = [self._chunk(choice) for choice in self._choices(emitted)]
        if self._asked.x_redrafter is not None:
            chunks = chunks or [self._chunk(self._empty_choice(emitted.answer))]
            chunks[0]["x_redrafter"] = own_fields(emitted)
        if (reason := emitted.last.finish_reason) is not None:
            chunks.append(self._chunk(self._closing_choice(emitted.answer, reason)))
            chunks[-1]["timings"] = record.timings
        return chunks

    def silence(self) -> Json:
        """A chunk without content."""
        return self._chunk(self._empty_choice(0))

    def closing(self) -> Iterable[Json]:
        """Chunks after all answers have ended."""
        if self._asked.stream_options.include_usage:
            yield {**self._chunk(None), "usage": self._usage}

    def whole(self) -> Json:
        """The reply in one piece."""
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
        return {"id": self._id, "object": name, "created": self._created, "model": self._name}

    @property
    def _usage(self) -> Json:
        # The answers of one prompt share it, and it counts once.
        prompts = {one.prompt for one in self.wanted}
        completion = sum(record.last.generation_tokens for record in self.records)
        prompt = sum(map(len, prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def _wanted(
        self,
        param: str,
        prompt: object,
        first: int,
        max_tokens: int | None,
        alternatives: int | None,
    ) -> list[Wanted]:
        """`n` answers to one prompt.

        Args:
          param: the parameter that holds the prompt
          prompt: as `Redrafter.encode` takes it; a string is taken as it is
          first: number of the first of these answers
          alternatives: None without log-probabilities
        """
        model, asked = self._model, self._asked
        try:
            ids = model.encode(prompt, raw=isinstance(prompt, str))  # type: ignore[arg-type]
        except BadInputError as error:
            raise ApiError(400, str(error), param=param) from error
        limit = model.context_length
        room = _UNLIMITED if limit is None else limit - len(ids)
        if max_tokens is not None:
            room = max_tokens if limit is None else min(max_tokens, room)
        made = []
        for number in range(first, first + asked.n):
            options = asked.options(number, room, alternatives is not None)
            try:
                options = model.chosen_options(options, {})
            except BadInputError as error:  # all but this was checked with the request
                raise ApiError(400, str(error), param="logit_bias") from error
            made.append(Wanted(tuple(ids), options, alternatives or 0))
        return made

    def _token_text(self, token: int) -> str:
        text: Any = self._model.tokenizer.decode([token])
        return str(text)
