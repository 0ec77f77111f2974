"""Common part of the replies of every API: one request, its answers, whole or as a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, Generic, TypeVar

from redrafter_mlx.decoding.constraint import Constraint
from redrafter_mlx.engine.request import Request
from redrafter_mlx.server.answers.answering import Emitted
from redrafter_mlx.server.answers.record import Record
from redrafter_mlx.server.answers.sse import Framing, Json
from redrafter_mlx.server.api_error import ApiError, blamed_on
from redrafter_mlx.server.hosting import Hosted
from redrafter_mlx.server.requests.generation_request import GenerationRequest

R = TypeVar("R", bound=GenerationRequest)

_UNLIMITED = 4096
"""Maximum number of tokens of an answer if neither the request nor the model sets a limit."""


class Reply(ABC, Generic[R]):
    """The reply to one request: it takes what steps emit and returns events, or the whole reply.

    requests: of the answers to generate
    records:  of these answers, in the same order
    alternatives: number of likeliest tokens to report with each token, if any are reported
    """

    framing: ClassVar[Framing]

    def __init__(self, asked: R, hosted: Hosted, arrived: float) -> None:
        """Raises ApiError if the model cannot do what the request asks.

        arrived: when the request came, by `time.perf_counter`
        """
        self._asked, self._hosted = asked, hosted
        self.requests = self._plan()
        self.records = [Record(arrived) for _ in self.requests]
        self.alternatives = asked.alternatives or 0

    @property
    def reports_prefill(self) -> bool:
        """Whether a stream reports the progress of prefill."""
        return False

    @abstractmethod
    def _plan(self) -> list[Request]:
        """Return the requests of the answers to generate."""

    @abstractmethod
    def opening(self) -> Iterable[Json]:
        """Return the events to send before anything is emitted."""

    @abstractmethod
    def add(self, emitted: Emitted) -> list[Json]:
        """Take what a step emitted; return the events that a stream sends for it."""

    @abstractmethod
    def silence(self) -> Json:
        """Return an event without content."""

    @abstractmethod
    def failed(self, error: ApiError) -> Json:
        """Return the event for an error, a stream's last."""

    @abstractmethod
    def whole(self) -> Json:
        """Return the reply to a request without a stream, once all answers have ended."""

    def closing(self) -> Iterable[Json]:
        """Return the events to send after all answers have ended."""
        return ()

    def reading(self, answer: int, read: int, total: int) -> Json:
        """Return an event with the prefill progress of an answer's prompt."""
        raise NotImplementedError

    def _requests(
        self,
        prompt: tuple[int, ...],
        max_tokens: int | None,
        constraint: Callable[[], Constraint | None] = lambda: None,
        answers: int = 1,
    ) -> list[Request]:
        """Return the requests of the answers to one prompt, each with its own constraint."""
        model = self._hosted.model
        room = model.prompts.room_for(prompt, max_tokens or model.context_length or _UNLIMITED)
        requests = []
        for number in range(answers):
            options = self._asked.options(number, room)
            with blamed_on("logit_bias"):  # other options were checked with the request
                options = model.chosen_options(options, {})
            requests.append(Request(prompt, options, constraint()))
        return requests
