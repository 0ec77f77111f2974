"""There is one wired-memory limit per process, for any number of models."""

from __future__ import annotations

import mlx.core as mx
import pytest
from tiny import byte_model, byte_tokenizer

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import EngineFailedError
from redrafter_mlx.runtime import device

RECOMMENDED = 10**12

ENDLESS = 10**5
"""Tokens of an answer that still runs when the test ends it."""


class Process:
    """A process on Metal, whose recommended working set is larger than any model.

    waited: the limit at each wait for the device
    """

    def __init__(self) -> None:
        self.limit = 0
        self.waited: list[int] = []

    def set_wired_limit(self, limit: int) -> int:
        before, self.limit = self.limit, limit
        return before

    def synchronize(self) -> None:
        self.waited.append(self.limit)

    def device_info(self, *_: object) -> dict[str, int]:
        return {"max_recommended_working_set_size": RECOMMENDED}

    def __getattr__(self, name: str) -> object:
        return getattr(mx, name)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    process = Process()
    monkeypatch.setattr(device, "mx", process)
    return process


def models() -> list[Redrafter]:
    return [
        Redrafter(byte_model(seed, max_position_embeddings=10 * ENDLESS), byte_tokenizer())
        for seed in (1, 2)
    ]


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_the_limit_is_raised_while_any_model_decodes_and_put_back_after_the_last(
    process: Process, first_to_end: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """No computation runs while it changes, and nothing is printed."""
    answers = [model.stream([1, 2, 3], max_tokens=ENDLESS) for model in models()]
    for answer in answers:
        next(answer)
    answers.pop(first_to_end).close()
    assert process.limit == RECOMMENDED
    answers.pop().close()
    assert process.limit == 0
    assert process.waited == [RECOMMENDED]
    assert capfd.readouterr() == ("", "")


def test_the_limit_is_put_back_after_an_error(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = models()
    running = one.stream([1, 2, 3], max_tokens=ENDLESS)
    next(running)

    def broken(*_: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(other.target, "hidden", broken)
    with pytest.raises(EngineFailedError, match="broken"):
        other.generate([1, 2, 3])
    assert process.limit == RECOMMENDED
    running.close()
    assert process.limit == 0
