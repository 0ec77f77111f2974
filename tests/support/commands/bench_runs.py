"""Runs of `bench` with tiny models: their loaders, options and results."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from command_line import CommandLine
from tiny import byte_model, byte_tokenizer, random_drafter, tiny_source

from redrafter_mlx.cli import main, options
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions

QUICK = ["bench", "--categories", "writing", "--max-tokens", "6", "-r", "1", "--warmup", "0"]
SHAPES = ["--beam-width", "1..2", "--beam-length", "3"]
SOURCE = tiny_source()


class Loader:
    """Stands for loading, and records the options."""

    def __init__(self) -> None:
        self.asked: list[options.ModelOptions] = []

    def __call__(
        self, asked: options.ModelOptions, engine: EngineOptions | None = None, **_: object
    ) -> Redrafter:
        self.asked.append(asked)
        drafter = None if asked.drafter == "none" else random_drafter(seed=1, vocab_size=258)
        return Redrafter(byte_model(), byte_tokenizer(), drafter, source=SOURCE, engine=engine)


@pytest.fixture(autouse=True)
def loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    made = Loader()
    monkeypatch.setattr(options, "load_model", made)
    return made


Result = Callable[..., dict[str, Any]]
"""Runs a quick `bench`, and returns what it prints as JSON."""

Refusal = Callable[..., str]
"""Returns the one line with which a quick `bench` is refused."""


@pytest.fixture
def result(cli: CommandLine) -> Result:
    def run(*arguments: str, status: int = 0) -> dict[str, Any]:
        out = cli.run(*QUICK, *arguments, "--json", status=status).out
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found

    return run


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    def run(*arguments: str) -> str:
        capsys.readouterr()
        assert main.run([*QUICK, *arguments]) in (1, 2)
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("error: ")
        return err

    return run
