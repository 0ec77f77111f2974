"""There is one wired-memory limit per process, for any number of models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import mlx.nn as nn
import pytest
from tiny import byte_model, byte_tokenizer

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import EngineFailedError
from redrafter_mlx.runtime import wired_memory


class Process:
    """A process whose limit is set and restored as by mlx-lm's `wired_limit` on Metal."""

    def __init__(self) -> None:
        self.limit = 0

    @contextlib.contextmanager
    def wired_limit(self, _: nn.Module) -> Iterator[None]:
        before, self.limit = self.limit, 100
        try:
            yield
        finally:
            self.limit = before


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    process = Process()
    monkeypatch.setattr(wired_memory, "wired_limit", process.wired_limit)
    return process


def models() -> list[Redrafter]:
    return [Redrafter(byte_model(seed), byte_tokenizer()) for seed in (1, 2)]


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_the_limit_is_raised_while_any_model_decodes_and_put_back_after_the_last(
    process: Process, first_to_end: int
) -> None:
    answers = [model.stream([1, 2, 3], max_tokens=400) for model in models()]
    for answer in answers:
        next(answer)
    answers.pop(first_to_end).close()
    assert process.limit == 100
    answers.pop().close()
    assert process.limit == 0


def test_the_limit_is_put_back_after_an_error(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = models()
    running = one.stream([1, 2, 3], max_tokens=400)
    next(running)

    def broken(*_: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(other.target, "hidden", broken)
    with pytest.raises(EngineFailedError, match="broken"):
        other.generate([1, 2, 3])
    assert process.limit == 100
    running.close()
    assert process.limit == 0
