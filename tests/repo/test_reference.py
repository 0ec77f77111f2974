"""docs/reference/commands.md is the commands as they are.

`make reference` generates it.
"""

from __future__ import annotations

import re

import pytest
import typer
from places import ROOT

from redrafter_mlx.cli.main import app

PAGE = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
SECTIONS = dict(re.findall(r"^## `redrafter-mlx ([\w ]+)`\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


def test_the_reference_has_every_command() -> None:
    assert list(SECTIONS) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_reference_has_every_option_with_its_help(name: str) -> None:
    options = [p for p in COMMANDS[name].params if p.param_type_name == "option"]
    shown = {
        flag
        for line in re.findall(r"^\* `(-[^`]*)`", SECTIONS[name], re.M)
        for flag in re.findall(r"--?[\w-]+", re.sub(r"\s[^-/].*", "", line))
    }
    assert shown == {flag for p in options for flag in [*p.opts, *p.secondary_opts]} | {"--help"}
    for option in options:
        assert (option.help or "") in SECTIONS[name], option.name
