"""How the console script starts: Ctrl-C during imports, and closed standard streams."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from redrafter_mlx.cli.terminal import StopKey

START = ROOT / "cli" / "start" / "__init__.py"


def run(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the console script with a shell's redirections."""
    return subprocess.run(
        ["sh", "-c", f'exec "$0" "$1" {line}', sys.executable, str(START)],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize("module", ["redrafter_mlx", "typer"])
def test_ctrl_c_while_a_module_is_imported_is_130_without_text(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n"
    )
    done = run("list", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_that_the_caller_ignores_stays_ignored(tmp_path: Path) -> None:
    (tmp_path / "redrafter_mlx.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nos._exit(7)\n"
    )
    line = f'trap "" INT; exec "{sys.executable}" "{START}" list'
    done = subprocess.run(
        ["sh", "-c", line], env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=60, check=False
    )
    assert done.returncode == 7


def test_ctrl_c_while_python_ends_is_130_without_text() -> None:
    code = (
        "import atexit, os, runpy, signal, sys\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        f"sys.argv = [{str(START)!r}, '--version']\n"
        f"runpy.run_path({str(START)!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_a_key_that_stops_work_leaves_an_ignored_interrupt_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopKey(answering=True) as stop:
            os.kill(os.getpid(), signal.SIGINT)
        assert not stop.pressed
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


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
    """MLX cannot read a file with descriptor 0, and stdout would write to one with descriptor 1."""
    code = (
        "import os, sys; from redrafter_mlx.cli.terminal import open_missing_streams as open_;"
        "open_(); fd = os.open(os.devnull, os.O_RDONLY);"
        "same = [s.fileno() for s in (sys.stdin, sys.stdout, sys.stderr)] == [0, 1, 2];"
        "sys.exit(0 if fd > 2 and same and os.get_inheritable(0) else 1)"
    )
    line = f'exec "{sys.executable}" -c "{code}" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", line], timeout=60, check=False).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line_and_a_closed_pipe_none() -> None:
    full = run("--version >/dev/full", PYTHONUNBUFFERED="")
    assert (full.returncode, full.stderr) == (1, "error: No space left on device\n")
    closed = run("list | true", PYTHONUNBUFFERED="")
    assert closed.stderr == ""
