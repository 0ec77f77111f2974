"""What child processes run in tests: each ends in its own way."""

from __future__ import annotations

import errno
import os
import signal

from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.processes.child_process import Send


def interrupted(_: Send) -> None:
    signal.raise_signal(signal.SIGINT)


def refused(send: Send) -> None:
    send("begun")
    raise BadInputError("this cannot be used; give another")


def disk_full(_: Send) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/tmp/block")


def faulty(_: Send) -> None:
    raise KeyError("odd")


def killed(_: Send) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def left(_: Send) -> None:
    os._exit(3)


def counting(send: Send) -> None:
    for number in (1, 2, 3):
        send(number)
