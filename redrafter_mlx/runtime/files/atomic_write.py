"""Atomic writes: a file appears complete or not at all, whatever happens while it is written."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from redrafter_mlx.errors import BadInputError

_MLX_CANNOT_WRITE = ("[write]", "[save_safetensors]")


@contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path in the same folder; the file written there replaces `path`.

    If it must be `durable`, the file is flushed to disk first, so that a power cut leaves the old
    file or the new one. That takes milliseconds. The
    temporary path has the suffix of `path`, by which matplotlib chooses a format.

    Raises OSError, naming `path`, if it cannot be written.
    """
    partial = path.with_name(f".{os.getpid()}-{threading.get_ident()}.{path.name}")
    try:
        with name_in_errors(path):
            yield partial
            if durable:
                flush_to_disk(partial)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Flush a written file; on macOS, fsync alone leaves it in the disk's own cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if sys.platform == "darwin":
            with suppress(OSError):  # not every file system can
                fcntl.fcntl(file.fileno(), fcntl.F_FULLFSYNC)


@contextmanager
def locked(path: Path, taken: str, *, shared: bool = False) -> Iterator[None]:
    """Hold a lock on a folder or file, which nothing but `locked` respects.

    shared: others may hold it too, if they share it

    Raises BadInputError, with the text `taken`, if another process holds it. Where the file
    system has no locks, there is none.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInputError(taken) from None
        except OSError:  # a network's file system
            pass
        yield
    finally:
        os.close(file)


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Name `path` in any OSError raised inside.

    The error of a full disk names no file, and MLX raises RuntimeError instead of OSError.
    """
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    except RuntimeError as error:
        if not str(error).startswith(_MLX_CANNOT_WRITE):
            raise
        full = "; is the disk full?" if str(error).startswith("[write]") else ""
        raise OSError(errno.EIO, f"cannot be written: {error}{full}", str(path)) from error


def remove_abandoned(partials: Iterable[Path]) -> None:
    """Remove the temporary files of `atomic_write` among `partials` whose process has ended."""
    for partial in partials:
        writer = partial.name[1:].split("-")[0]
        if writer.isdecimal() and not _is_running(int(writer)):
            partial.unlink(missing_ok=True)


def write_private_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a text file atomically with mode 0600; creates parent directories.

    durable: as in `atomic_write`
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, durable=durable) as partial:
        partial.touch(mode=0o600)
        partial.write_text(text, encoding="utf-8")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        pass
    return True
