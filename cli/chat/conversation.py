"""What the chat asks of a model, be it in this process or on a server."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from redrafter_mlx.config import BeamShape, GenerationOptions

if TYPE_CHECKING:
    from redrafter_mlx.decoding.step_result import Source


class ModelSource(Protocol):
    """Which model answers; see `TargetSource`."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path | str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def bits(self) -> int | None: ...


class Model(Protocol):
    """A model as the chat describes it; see `Redrafter`."""

    @property
    def source(self) -> ModelSource | None: ...
    @property
    def drafting(self) -> str | None: ...
    @property
    def drafter_note(self) -> str | None: ...


class Token(Protocol):
    """One token of an answer; see `Response`.

    source: None for what only ends an answer and brings no token
    """

    @property
    def text(self) -> str: ...
    @property
    def source(self) -> Source | None: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def generation_tokens(self) -> int: ...
    @property
    def generation_tps(self) -> float: ...
    @property
    def steps(self) -> int: ...
    @property
    def tokens_per_step(self) -> float: ...
    @property
    def usual_shape(self) -> BeamShape | None: ...
    @property
    def usual_nodes(self) -> float | None: ...


class Conversation(Protocol):
    """Turns of user and assistant; see `Session`."""

    system: str | None
    messages: list[dict[str, str]]

    def clear(self) -> None: ...

    def stream(self, text: str, *, options: GenerationOptions) -> Generator[Token, None, None]: ...
