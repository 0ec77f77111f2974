"""The model is the first argument of each command that runs one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from command_line import CommandLine

from redrafter_mlx.cli import main, options, serve
from redrafter_mlx.cli.train import screen as train_screen
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.errors import RedrafterError

COMMANDS = ("chat", "generate", "serve", "bench", "tune", "verify", "train")


class FoundError(RedrafterError):
    """Ends a command where it would load its model."""


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Return the models that commands would have loaded.

    The environment names a BLAS, or `tune` would look for the model first to compare several.
    """
    monkeypatch.setenv("REDRAFTER_BLAS", "the one in use")
    models: list[str | None] = []

    def load(asked: options.ModelOptions, *_: object, **__: object) -> None:
        models.append(asked.model)
        raise FoundError

    def run_training(job: TrainingJob, **_: object) -> None:
        models.append(job.model)
        raise FoundError

    def run(_: object, loading: options.ModelOptions, names: Sequence[str]) -> None:
        load(replace(loading, model=names[0]))

    monkeypatch.setattr(options, "load_model", load)
    monkeypatch.setattr(serve, "run", run)
    monkeypatch.setattr(train_screen, "run_training", run_training)
    return models


def arguments(command: str, *model: str) -> list[str]:
    """Return a command line, with a message for `generate`."""
    return [command, *model, *(["hello"] if command == "generate" else [])]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_first_argument_of_a_command_is_its_model(
    command: str, found: list[str | None]
) -> None:
    main.run(arguments(command, "org/some-model"))
    assert found == ["org/some-model"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_model_may_be_an_option_instead_but_not_as_well(
    command: str, found: list[str | None], cli: CommandLine
) -> None:
    message = ["-p", "hello"] if command == "generate" else []
    main.run([command, *message, "-m", "org/other"])
    assert found == ["org/other"]
    error = cli.error(command, "org/some-model", *message, "--model", "org/other")
    assert "org/some-model" in error
    assert "org/other" in error
    assert found == ["org/other"]


def test_a_message_by_its_option_leaves_the_first_argument_to_the_model(
    found: list[str | None],
) -> None:
    main.run(["generate", "org/some-model", "-p", "hello"])
    main.run(["generate", "-p", "hello"])
    assert found == ["org/some-model", None]


def test_a_message_without_a_model_is_refused_by_name(
    found: list[str | None], cli: CommandLine
) -> None:
    error = cli.error("generate", "Why is the sky blue?", status=2)
    assert "'Why is the sky blue?' is taken as the model" in error
    assert "-p TEXT" in error
    assert found == []


def test_bench_serve_is_a_command_beside_the_model_of_bench(
    found: list[str | None], cli: CommandLine
) -> None:
    assert "no-url" in cli.error("bench", "serve", "--url", "no-url")
    assert "--users" in cli.out("bench", "serve", "--help")
    assert found == []


def test_what_a_report_says_of_its_command_has_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench` is handed what the command line sets, however it was set."""
    given: list[object] = []
    monkeypatch.setattr("redrafter_mlx.cli.bench.run.run", lambda *got: given.append(got[-1]))
    main.run(["bench", "org/some-model", "--limit", "3"])
    assert given == [{"model", "limit"}]
