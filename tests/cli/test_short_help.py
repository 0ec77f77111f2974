"""`--help` lists the options that people look for, and `--help-all` all of them."""

from __future__ import annotations

import re

import pytest
import typer
from typer.core import TyperCommand

from redrafter_mlx.cli import main
from redrafter_mlx.cli.short_help import COMMON

COMMANDS: dict[str, TyperCommand] = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]


def options_of(command: str) -> set[str]:
    given = [p for p in COMMANDS[command].params if p.param_type_name == "option"]
    return {option.opts[0] for option in given}


def listed(command: str, asked: str, capsys: pytest.CaptureFixture[str]) -> tuple[set[str], str]:
    """Return the options that a help lists, but itself, and the whole text."""
    assert main.run([*command.split(), asked]) == 0
    text = capsys.readouterr().out
    names = set(re.findall(r"^[│|] +\*? *(--[a-z-]+)", text, re.MULTILINE))
    return names - {"--help"}, " ".join(text.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_the_common_options_and_says_how_to_see_the_others(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    every = options_of(command)
    few, text = listed(command, "--help", capsys)
    if len(every) > 15:
        assert few == every & COMMON
        assert 8 <= len(few) <= 17
        more = len(every - few)
        assert f"{more} more options: redrafter-mlx {command} --help-all" in text
    else:
        assert few == every
        assert "--help-all" not in text
    assert listed(command, "--help-all", capsys)[0] == every


def test_every_common_option_is_one() -> None:
    assert set().union(*map(options_of, COMMANDS)) >= COMMON
