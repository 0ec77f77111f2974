"""Options come from the dataclass that they fill: names, types, defaults and validation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from redrafter_mlx.cli.options import (
    GENERATION,
    Flag,
    ModelOptions,
    TargetOptions,
    flag,
    with_options,
)
from redrafter_mlx.config import GenerationOptions


@dataclass(frozen=True)
class Sizes:
    width: int = flag(3, Flag("How wide.", "W"))
    names: tuple[str, ...] = flag((), Flag("Names.", "NAME"))
    deep: bool = flag(True, Flag("Stay flat.", names=("--no-deep",)))
    height: float | None = flag(None, Flag("How high.", "H"))


def filled(*arguments: str) -> tuple[Sizes, GenerationOptions]:
    """Return what a command with these options gets."""
    got: list[tuple[Sizes, GenerationOptions]] = []
    app = typer.Typer()

    @with_options
    def command(
        *,
        sizes: Sizes,
        generation: Annotated[GenerationOptions, ("max_tokens", "stop")] = GenerationOptions(  # noqa: B008
            max_tokens=7
        ),
    ) -> None:
        got.append((sizes, generation))

    app.command()(command)
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return got[0]


def test_without_options_the_defaults_are_the_dataclass_or_the_commands() -> None:
    assert filled() == (Sizes(), GenerationOptions(max_tokens=7))


def test_options_fill_the_fields_of_their_names_and_types() -> None:
    line = "--width 4 --names a --names b --no-deep --height 1.5 --max-tokens 9 --stop x"
    sizes, generation = filled(*line.split())
    assert sizes == Sizes(4, ("a", "b"), False, 1.5)
    assert generation == GenerationOptions(max_tokens=9, stop=("x",))


def test_a_command_has_no_other_fields_than_those_it_takes() -> None:
    with pytest.raises(AssertionError, match="--temperature"):
        filled("--temperature", "1")


def test_every_option_of_an_answer_is_on_the_command_line_but_those_named_here() -> None:
    library = {"logit_bias", "logprobs", "prefixes", "cache_prompt", "repetition_context"}
    assert {*GENERATION} == {f.name for f in fields(GenerationOptions)} - library


def test_a_model_has_all_the_options_of_a_target() -> None:
    targets = {f.name for f in fields(TargetOptions)}
    assert {f.name for f in fields(ModelOptions)} - targets == {"drafter", "drafter_bits"}
