"""An engine of a tiny model, and how it reads prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace

import mlx.nn as nn
import pytest
from engines import ENDLESS, Build, make
from tiny import byte_model

from redrafter_mlx.engine.engine import Redrafter


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return byte_model(seed=1, max_position_embeddings=10 * ENDLESS)


@pytest.fixture
def build(model: nn.Module) -> Iterator[Build]:
    with ExitStack() as made:
        yield lambda *given, **limits: made.enter_context(closing(make(model, *given, **limits)))


@pytest.fixture
def redrafter(build: Build) -> Redrafter:
    return build()


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """While answers run, prompts are read in the smallest chunks."""
    monkeypatch.setattr("redrafter_mlx.engine.prompts.reading.PREFILL_SECONDS", 1e-6)
    monkeypatch.setattr("redrafter_mlx.engine.prompts.reading.MIN_TOKENS", 32)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time by which chunks are planned: one number, which stands still by itself."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("redrafter_mlx.engine.prompts.reading.time", clock)
    return now
