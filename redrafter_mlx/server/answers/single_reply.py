"""Common part of the replies that are one answer in parts: reasoning, texts and calls in order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace

from redrafter_mlx.engine.request import Request
from redrafter_mlx.server.answers.answering import Emitted
from redrafter_mlx.server.answers.logprobs import entries
from redrafter_mlx.server.answers.parts import AnswerParts
from redrafter_mlx.server.answers.record import Record
from redrafter_mlx.server.answers.reply import R, Reply
from redrafter_mlx.server.answers.sse import Json
from redrafter_mlx.server.hosting import Hosted
from redrafter_mlx.structured.plan import OutputPlan
from redrafter_mlx.weights.text.markup import Delta


class SingleReply(Reply[R]):
    """The reply to one request, with one answer.

    White space between reasoning and a call, or between calls, is no text.
    """

    def __init__(self, asked: R, hosted: Hosted, arrived: float) -> None:
        super().__init__(asked, hosted, arrived)
        self._held, self._texts = "", False  # white space; whether a text is being written
        self._logprobs = list[Json]()  # of tokens of which no part has come yet

    @abstractmethod
    def _planned(self) -> tuple[OutputPlan, int | None]:
        """Return how the request is answered, and the maximum number of its tokens."""

    @abstractmethod
    def _take(self, delta: Delta) -> Iterable[Json]:
        """Take a part of the answer; return its events."""

    @abstractmethod
    def _end(self) -> Iterable[Json]:
        """Return the events at the end of the answer."""

    def _plan(self) -> list[Request]:
        plan, max_tokens = self._planned()
        self._parts = AnswerParts(plan.parser())
        return self._requests(plan.prompt, max_tokens, plan.constraint)

    @property
    def _record(self) -> Record:
        return self.records[0]

    def add(self, emitted: Emitted) -> list[Json]:
        self._record.add(emitted)
        events: list[Json] = []
        for each in [emitted] if emitted.logprobs is None else emitted.by_token:
            reasoning = self._parts.reasoning_tokens
            deltas = self._parts.add(each)
            if reasoning == self._parts.reasoning_tokens:
                self._logprobs += entries(self._hosted, each)
            for delta in deltas:
                for visible in self._without_white_space(delta):
                    events += self._take(visible)
        return [*events, *self._end()] if self._parts.finish_reason is not None else events

    def _read_logprobs(self) -> list[Json]:
        """Return the entries of the tokens of the text, or the call, that comes now."""
        read, self._logprobs = self._logprobs, []
        return read

    def _without_white_space(self, delta: Delta) -> Iterator[Delta]:
        if not delta.content:
            self._held, self._texts = "", False
            yield delta
        elif self._texts or not delta.content.isspace():
            content, self._held, self._texts = self._held + delta.content, "", True
            yield replace(delta, content=content)
        else:
            self._held += delta.content
