"""Child processes that end with their parent, however the parent ends.

A child of `multiprocessing` can wait for its parent: it holds one end of a pipe, the parent alone
holds the other, and the system closes that end when the parent ends. The waiting thread needs the
GIL, which a library may hold for a while. So on Linux the system is also asked to end the child.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

_PR_SET_PDEATHSIG = 1
"""From Linux's <sys/prctl.h>."""


def start_child(function: Callable[..., None], *arguments: object) -> BaseProcess:
    """Call a function in a new process that ignores Ctrl-C; the parent must end it."""
    work = pickle.dumps((function, arguments))
    child = mp.get_context("spawn").Process(target=_run, args=(work,), daemon=True)
    resource_tracker.ensure_running()  # starting it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the child inherits it
    try:
        child.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child


def _run(work: bytes) -> None:
    """The child's main function. It watches the parent before it unpickles, and so imports."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    function, arguments = pickle.loads(work)
    function(*arguments)


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
