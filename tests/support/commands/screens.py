"""A scripted model and a screen for the chat's loop."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from redrafter_mlx.config import BeamShape, GenerationOptions
from redrafter_mlx.errors import BadInputError, RedrafterError
from redrafter_mlx.response import Source


@dataclass(frozen=True)
class FakeToken:
    text: str
    generation_tokens: int
    finish_reason: str | None = None
    prompt_tokens: int = 7
    prompt_tps: float = 100.0
    generation_tps: float = 14.25
    peak_memory: float = 0.5
    steps: int = 3
    tokens_per_step: float = 2.31
    usual_shape: BeamShape | None = None
    usual_nodes: float | None = None
    source: Source = "model"


class FakeSession:
    """Answers with the message itself; as in Session, a turn with a text is kept."""

    ends_between_tokens = True

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.options: list[GenerationOptions] = []

    def clear(self) -> None:
        self.messages = []

    def stream(
        self,
        text: str,
        *,
        options: GenerationOptions | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Generator[FakeToken, None, None]:
        if text == "refuse":
            raise BadInputError("the prompt is too long; /clear makes it shorter")
        assert options is not None
        self.options.append(options)
        assert on_prefill is not None
        return self._turn(text, on_prefill)

    def _turn(
        self, text: str, on_prefill: Callable[[int, int], None]
    ) -> Generator[FakeToken, None, None]:
        words: list[str] = []
        try:
            for n, word in enumerate(self._words(text, on_prefill), 1):
                words.append(word)
                yield FakeToken(word, n, source="lookup" if n > 1 else "drafter")
        finally:
            if words:
                self.messages += [
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": "".join(words)},
                ]

    def _words(self, text: str, on_prefill: Callable[[int, int], None]) -> Iterator[str]:
        if text == "long":
            for read in range(10_000, 30_001, 5_000):
                time.sleep(0.5)
                on_prefill(read, 30_000)
        if text == "think":
            for _ in range(3000):
                time.sleep(0.01)
        if text == "count":
            for n in range(10**6):
                yield f"{n} "
                time.sleep(0.002)
        if text == "break":
            yield "half"
            raise RedrafterError("the model broke")
        if text == "escape":
            yield "red\x1b"
            yield "[31m\x07\x9b\u202e!"
        else:
            yield f"turn {len(self.messages) // 2 + 1}:"
            yield f" {json.dumps(text)}"


class FakeModel:
    source = SimpleNamespace(name="fake-model", path="/fake", dtype="float32", bits=None)
    drafting = None
    drafter_note = "no drafter for fake-model"

    def session(self, system: str | None = None) -> FakeSession:
        return FakeSession(system)


class Screen(io.StringIO):
    """The output that a terminal receives."""

    def isatty(self) -> bool:
        return True
