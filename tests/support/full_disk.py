"""A disk that is full, for which a limit of the size of files stands."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Limit the size of every file; the error names no file, as on a full disk."""
    was = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, was[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, was)
        signal.signal(signal.SIGXFSZ, handler)
