"""Child processes that end with their parent, and only with it, and say why they fail."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from children import counting, disk_full, faulty, killed, left, refused
from fresh_process import python

from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.runtime.processes.child_process import Child, Send, start_child


def test_ctrl_c_does_not_end_the_first_child_of_a_process() -> None:
    code = (
        "import os, signal, sys, time; sys.path[:0] = ['tests/support']\n"
        "from children import interrupted\n"
        "from redrafter_mlx.runtime.processes.child_process import start_child\n"
        "child = start_child(interrupted).process; child.join()\n"
        "print(child.exitcode, signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )
    assert python(code) == "0 set()"


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (refused, r"^this cannot be used; give another$"),
        (disk_full, r"^/tmp/block: No space left on device$"),
        (faulty, r"^KeyError: 'odd' \(children\.py, line \d+\)$"),
        (killed, r"SIGKILL"),
        (left, r"status 3"),
    ],
)
def test_a_childs_error_is_one_line_at_its_parent_and_no_traceback(
    function: Callable[[Send], None], line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    child = start_child(function)
    child.process.join()
    with pytest.raises(RedrafterError, match=line):
        child.check()
    assert capfd.readouterr().err == ""


def test_what_a_child_sends_is_received_in_order_and_once() -> None:
    child = start_child(counting)
    child.process.join()
    assert [child.check(), child.check()] == [[1, 2, 3], []]


def test_a_child_that_runs_has_no_error() -> None:
    child: Child = start_child(endless)
    try:
        assert child.check() == []
    finally:
        child.process.terminate()
        child.process.join()


def endless(_: Send) -> None:
    signal.pause()
