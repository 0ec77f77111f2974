"""Commands of `redrafter-mlx`, run in the process of the tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from redrafter_mlx.cli import main


class Shown(NamedTuple):
    out: str
    err: str


@dataclass(frozen=True)
class CommandLine:
    """Runs commands, and returns what each of them prints."""

    captured: pytest.CaptureFixture[str]

    def run(self, *arguments: object, status: int = 0) -> Shown:
        """Return all that a command prints that exits with this status."""
        self.captured.readouterr()
        found = main.run([*map(str, arguments)])
        shown = Shown(*self.captured.readouterr())
        assert found == status, shown.err
        return shown

    def out(self, *arguments: object) -> str:
        """Return the standard output of a command that succeeds."""
        return self.run(*arguments).out

    def json(self, *arguments: object) -> Any:
        """Return what a command that succeeds prints as JSON, on its last line."""
        return json.loads(self.out(*arguments).splitlines()[-1])

    def error(self, *arguments: object, status: int = 1) -> str:
        """Return the error of a command that is refused: one line, and nothing else is printed."""
        out, err = self.run(*arguments, status=status)
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        return err
