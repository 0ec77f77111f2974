"""Files that a user names, or that lie in a user's folder, are opened only if they are files.

To read a named pipe or a device may never end, and a socket cannot be opened.
"""

from __future__ import annotations

import errno
import stat
from pathlib import Path

_OTHERS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_PASSED_ON = (Path("/dev/stdin"), Path("/dev/fd"))
"""The standard input, and the folder of the pipes that a shell opens for `<(COMMAND)`."""


def check_regular(path: Path) -> None:
    """Raise OSError, whose `strerror` says what it is, for a named pipe, a socket or a device.

    Raises OSError as well if there is nothing at the path.
    """
    kind = _OTHERS.get(stat.S_IFMT(path.stat().st_mode))
    if kind is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))


def read_regular_text(path: Path, encoding: str = "utf-8") -> str:
    """Return the text of a file, or of what a shell passes on; raises OSError and ValueError."""
    if path not in _PASSED_ON and path.parent not in _PASSED_ON:
        check_regular(path)
    return path.read_text(encoding=encoding)
