"""Child processes that end with their parent, and only with it."""

from __future__ import annotations

from test_config import python


def test_ctrl_c_does_not_end_the_first_child_of_a_process() -> None:
    code = (
        "import signal; from redrafter_mlx.runtime.child_process import start_child\n"
        "child = start_child(signal.raise_signal, signal.SIGINT); child.join()\n"
        "print(child.exitcode, signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )
    assert python(code) == "0 set()"
