"""Options come from the dataclass that they fill: names, types, defaults and validation."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer
from command_line import CommandLine
from typer.testing import CliRunner

from redrafter_mlx.cli import main, serve
from redrafter_mlx.cli.flag import Flag
from redrafter_mlx.cli.options import GENERATION, TARGET, ModelOptions, TargetOptions, with_options
from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.weights.registry import DEFAULT_MODEL


@dataclass(frozen=True)
class Sizes:
    width: Annotated[int, Flag("How wide.", "W")] = 3
    names: Annotated[tuple[str, ...], Flag("Names.", "NAME")] = ()
    deep: Annotated[bool, Flag("Stay flat.", names=("--no-deep",))] = True
    height: Annotated[float | None, Flag("How high.", "H")] = None
    hidden: int = 5


def filled(*arguments: str) -> tuple[Sizes, GenerationOptions, str | None]:
    """Return what a command with these options gets."""
    got: list[tuple[Sizes, GenerationOptions, str | None]] = []
    app = typer.Typer()

    @with_options
    def command(
        *,
        sizes: Sizes,
        generation: Annotated[GenerationOptions, ("max_tokens", "stop")] = GenerationOptions(  # noqa: B008
            max_tokens=7
        ),
        owner: Annotated[
            str | None, Flag("Whose.", "NAME", names=("--owner", "-o"), variable="OWNER")
        ] = None,
    ) -> None:
        got.append((sizes, generation, owner))

    app.command()(command)
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return got[0]


def test_without_options_the_defaults_are_the_dataclass_or_the_commands() -> None:
    assert filled() == (Sizes(), GenerationOptions(max_tokens=7), None)


def test_a_variable_of_the_environment_gives_what_the_command_line_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OWNER", "you")
    assert filled()[2] == "you"
    assert filled("-o", "me")[2] == "me"


def test_options_fill_the_fields_of_their_names_and_types() -> None:
    line = "--width 4 --names a --names b --no-deep --height 1.5 --max-tokens 9 --stop x -o me"
    sizes, generation, owner = filled(*line.split())
    assert sizes == Sizes(4, ("a", "b"), False, 1.5)
    assert generation == GenerationOptions(max_tokens=9, stop=("x",))
    assert owner == "me"


@pytest.mark.parametrize("name", ["--temperature", "--hidden"])
def test_a_command_has_no_other_fields_than_those_it_takes(name: str) -> None:
    with pytest.raises(AssertionError, match=name):
        filled(name, "1")


def test_an_option_without_default_must_be_given() -> None:
    got: list[int] = []
    app = typer.Typer()

    @with_options
    def command(*, size: Annotated[int, Flag("How many.", "N", minimum=2)]) -> None:
        got.append(size)

    app.command()(command)
    for arguments, status in (((), 2), (("--size", "1"), 2), (("--size", "2"), 0)):
        assert CliRunner().invoke(app, list(arguments)).exit_code == status
    assert got == [2]


def test_help_names_the_default_model() -> None:
    """The registry needs MLX, which help does not import."""
    assert f"[default: {DEFAULT_MODEL}]" in TARGET.help


def test_every_option_of_an_answer_is_on_the_command_line_but_those_named_here() -> None:
    library = {"logit_bias", "logprobs", "cache_prompt", "repetition_context", "learn"}
    assert {*GENERATION} == {f.name for f in fields(GenerationOptions)} - library


def test_a_model_has_all_the_options_of_a_target() -> None:
    targets = {f.name for f in fields(TargetOptions)}
    assert {f.name for f in fields(ModelOptions)} - targets == {
        "drafter",
        "drafter_bits",
        "draft_vocab",
        "kv_bits",
        "quantized_kv_start",
    }


@pytest.mark.parametrize(
    ("typed", "number"),
    [("2000", 2000), ("24GB", 24 * 10**9), ("24 gb", 24 * 10**9), ("24G", 24 * 10**9),
     ("1.5M", 1_500_000), ("1e6", 10**6), ("2.5e3", 2500), ("16GiB", 16 * 2**30), ("8k", 8000),
     ("2_000_000", 2_000_000), ("2,000,000", 2_000_000), ("-1", -1), (".5k", 500)],
)  # fmt: skip
def test_a_whole_number_may_be_typed_with_its_multiple(typed: str, number: int) -> None:
    assert filled("--width", typed)[0].width == number
    assert filled(f"--max-tokens={typed}")[1].max_tokens == number if number > 0 else True


@pytest.mark.parametrize("typed", ["a", "", "1.5", "24XB", "1e-3", "G", "1 2", "nan", "1e999"])
def test_what_is_no_whole_number_is_refused_by_its_option(typed: str, cli: CommandLine) -> None:
    error = cli.error("show", "qwen3-8b", f"--context={typed}", status=2)
    assert "'--context'" in error
    assert "less than 1" in cli.error("show", "qwen3-8b", "--context=0", status=2)


def test_a_size_in_other_units_is_converted_to_the_options_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[int] = []
    monkeypatch.setattr(serve, "run", lambda serving, *_: served.append(serving.max_body))
    for typed in ("64", "64MB", "0.064 GB", "64_000k"):
        main.run(["serve", "--max-body", typed])
    assert served == [64] * 4


@pytest.mark.parametrize("command", ["train", "export", "bench"])
def test_o_is_where_a_command_writes(command: str) -> None:
    (registered,) = (c for c in main.app.registered_commands if c.name == command)
    assert registered.callback is not None
    parameters = inspect.signature(registered.callback).parameters.values()
    (written,) = (p for p in parameters if "-o" in getattr(p.default, "param_decls", ()))
    assert written.default.metavar == "DIR"
    assert "--output" in written.default.param_decls


def test_a_home_folder_is_expanded_where_no_shell_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    got: list[tuple[object, ...]] = []
    app = typer.Typer()

    @with_options
    def command(
        *,
        output: Annotated[str, Flag("Where.", "DIR")],
        file: Annotated[tuple[str, ...], Flag("What.", "FILE")] = (),
        text: Annotated[str, Flag("Said.", "TEXT")] = "",
    ) -> None:
        got.append((output, file, text))

    app.command()(command)
    CliRunner().invoke(app, ["--output=~/x", "--file=~/a", "--file=b", "--text=~/x"])
    assert got == [("/home/me/x", ("/home/me/a", "b"), "~/x")]
