"""How the console script begins where standard streams are closed."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(line: str) -> subprocess.CompletedProcess[str]:
    """The console script with a shell's redirections."""
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -m redrafter_mlx.cli.main {line}', sys.executable],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("closed", "shown"), [("<&-", True), (">&-", False), ("2>&-", True), ("<&- >&- 2>&-", False)]
)
def test_list_works_with_standard_streams_closed(closed: str, shown: bool) -> None:
    done = run(f"list {closed}")
    assert (done.returncode, done.stderr) == (0, "")
    assert ("vicuna-7b" in done.stdout) == shown


def test_a_prompt_from_a_closed_standard_input_is_refused_in_one_line() -> None:
    done = run("generate -p - <&-")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "standard input gave nothing" in done.stderr


def test_no_file_is_opened_under_the_number_of_a_closed_stream() -> None:
    """MLX cannot read a file that has number 0, and text for stdout would go into number 1's."""
    code = (
        "import os, sys; from redrafter_mlx.cli.terminal import open_missing_streams as open_;"
        "open_(); fd = os.open(os.devnull, os.O_RDONLY);"
        "same = [s.fileno() for s in (sys.stdin, sys.stdout, sys.stderr)] == [0, 1, 2];"
        "sys.exit(0 if fd > 2 and same and os.get_inheritable(0) else 1)"
    )
    line = f'exec "{sys.executable}" -c "{code}" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", line], timeout=60, check=False).returncode == 0
