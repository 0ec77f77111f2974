"""Files that appear whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_MLX_CANNOT_WRITE = ("[write]", "[save_safetensors]")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` to write to; what was written there then becomes `path`.

    Before that it is on the disk, so that a machine that stops leaves the old file or the new one.
    The name ends as `path` does: who writes pictures goes by that.

    Raises OSError naming `path` where it cannot be written.
    """
    partial = path.with_name(f".{os.getpid()}-{threading.get_ident()}.{path.name}")
    try:
        with naming(path):
            yield partial
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise an OSError that names `path` for a file that cannot be written inside.

    A full disk names no file, and MLX raises RuntimeError.
    """
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    except RuntimeError as error:
        if not str(error).startswith(_MLX_CANNOT_WRITE):
            raise
        raise OSError(errno.EIO, f"cannot be written: {error}", str(path)) from error


def remove_abandoned(partials: Iterable[Path]) -> None:
    """Remove those of the files that `whole_file` began whose process is gone."""
    for partial in partials:
        writer = partial.name[1:].split("-")[0]
        if writer.isdecimal() and not _is_running(int(writer)):
            partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a small text file for its owner's eyes alone, its folder first if that is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        partial.touch(mode=0o600)
        partial.write_text(text, encoding="utf-8")


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True
