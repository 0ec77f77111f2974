"""Runs of `tune` and `bench` with tiny models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.nn as nn
import pytest
from simulated import cliff, machine
from tiny import byte_model, byte_tokenizer, plain_tokens, random_drafter

from redrafter_mlx.cli import main, options
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning import profile
from redrafter_mlx.tuning.corrections import BatchCorrections
from redrafter_mlx.tuning.cost import CostModel, Setup
from redrafter_mlx.tuning.profile import Call, Profiler
from redrafter_mlx.tuning.store import save_record, saved_record

PROMPT = [72, 101, 108]
HEL = [39, 68, 75]
"""The tokens of "Hel"."""


CHEAP = machine(cliff(8))

DEAR = machine(lambda rows: 20.0 * rows)
"""Each row costs as much as a call: drafting cannot pay."""


class Bench:
    """A stand-in for measuring everything: returns given costs, and counts its calls."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.asked = 0

    def measure(self, setup: Setup, done: Callable[[float], None] | None = None) -> CostModel:
        self.asked += 1
        if done is not None:
            done(1.0)
        return replace(self.costs, setup=setup)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    """Simulate measurements, and store them in a temporary folder.

    Real step times are ignored, because they would contradict the simulation, and no drafter is
    tried on a text. The environment names a BLAS, so that those of this machine are not compared.
    """
    stand_in = Bench(CHEAP)
    monkeypatch.setenv("REDRAFTER_BLAS", "the one in use")
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    monkeypatch.setattr("redrafter_mlx.tuning.tuner.saved_record", saved_record)
    monkeypatch.setattr("redrafter_mlx.tuning.tuner.save_record", save_record)
    monkeypatch.setattr(Profiler, "measure", lambda _, *args: stand_in.measure(*args))
    monkeypatch.setattr(BatchCorrections, "learn", lambda *_: False)
    monkeypatch.setattr("redrafter_mlx.tuning.tuner.trial_shapes", lambda *_: ())
    return stand_in


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return byte_model(seed=1)


def oracle(model: nn.Module, prompt: list[int] = PROMPT) -> Redrafter:
    text = prompt + plain_tokens(model, prompt, 130)
    return Redrafter(model, byte_tokenizer(), Oracle(text, 258))


@pytest.fixture
def shell(bench: Bench, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs a command line on a model with an oracle drafter."""
    loaded = oracle(model, HEL)
    assert loaded.tuning is not None
    monkeypatch.setattr(loaded.tuning, "stores", True)
    monkeypatch.setattr("redrafter_mlx.cli.tune.command.trial_prompts", lambda *_: [HEL])
    assert bench.asked == 0

    def run(*arguments: str) -> int:
        monkeypatch.setattr(options, "load_model", lambda *_, **__: loaded)
        return main.run(list(arguments))

    return run


def drafted(model: nn.Module) -> Redrafter:
    return Redrafter(model, byte_tokenizer(), random_drafter(vocab_size=258))


def measured(redrafter: Redrafter) -> Redrafter:
    """Return the same redrafter with its machine measured."""
    assert redrafter.tuning is not None
    redrafter.tuning.measure()
    return redrafter


def time_calls_by(
    monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[Target, Call, int], float]
) -> None:
    monkeypatch.setattr(profile, "seconds_of", seconds_of)
