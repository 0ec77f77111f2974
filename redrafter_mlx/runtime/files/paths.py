"""Our cache folder, and free disk space.

The folder is $REDRAFTER_CACHE, or ~/.cache/redrafter-mlx. It holds model files that do not come
from the Hub (`models/`), cached checksums (`checksums/`), measured costs and acceptance statistics
(`tuning/`), the models whose trees were found exact (`exact/`), the fastest BLAS (`blas.txt`), how
published drafters are read (`calibration/`), tables of successors (`successors/`), weights that
were quantised at loading (`quantised/`), prompts that were read (`prompts/`), training corpora
(`corpora/`), the user's drafters (`drafters/`), answers with the drafters that learned from them
(`learning/`), the names of drafters that were not wanted (`declined-drafters/`) and the lines typed
in chats (`chat_history`).
Files from the Hub are in huggingface-hub's own cache.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from redrafter_mlx.errors import BadInputError, DownloadError

_SPARE = 100 * 1000**2
"""Bytes to leave free: a completely full disk breaks more than a download."""


class NoRoomError(DownloadError):
    """The disk has too little room for a download; another source would not help."""


def cache_dir() -> Path:
    """Return $REDRAFTER_CACHE, or ~/.cache/redrafter-mlx; it may not exist yet.

    Raises BadInputError if its path starts with an unknown home folder.
    """
    chosen = os.environ.get("REDRAFTER_CACHE") or "~/.cache/redrafter-mlx"
    try:
        return Path(chosen).expanduser()
    except RuntimeError as error:
        raise BadInputError(
            f"{chosen}: {error}", remedy="set REDRAFTER_CACHE to a folder"
        ) from error


def prompts_dir() -> Path:
    """Return the folder that keeps the prompts that were read, if no other one is named."""
    return cache_dir() / "prompts"


def keep_own_kernels() -> None:
    """Have MLX compile its CPU kernels in our cache if another user owns its usual folder.

    The usual one is `mlx` in the folder for temporary files, which nobody else may write into.
    """
    shared = Path(tempfile.gettempdir()) / "mlx"
    if sys.platform != "linux" or not shared.exists() or shared.stat().st_uid == os.getuid():
        return
    own = cache_dir() / "kernels"
    with contextlib.suppress(OSError):
        own.mkdir(parents=True, exist_ok=True)
        os.environ["TMPDIR"] = str(own)


def existing_part(folder: Path) -> Path:
    """Return the folder itself, or the nearest folder above it that is seen to exist."""
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def check_writable(folder: Path, option: str) -> None:
    """Raise BadInputError, naming the option, if nothing can be written into a folder.

    The folder need not exist, and is not created.
    """
    try:
        with tempfile.TemporaryFile(dir=existing_part(folder.absolute())):
            pass
    except OSError as error:
        raise BadInputError(
            f"{option} is {folder}, where nothing can be written: {error.strerror}"
        ) from None


def bytes_below(folder: Path, *, follow_links: bool = False) -> int:
    """Return the size of all readable files below a folder."""
    total = 0
    for root, _, names in os.walk(folder):
        for path in (Path(root) / name for name in names):
            with contextlib.suppress(OSError):  # a file may vanish meanwhile
                total += path.stat().st_size if follow_links or not path.is_symlink() else 0
    return total


def visible_files(folder: Path) -> list[Path]:
    """Return what the folder holds but hidden files, which are nobody's work.

    Finder leaves .DS_Store, and interrupted writing its partial files.
    """
    return [*folder.glob("[!.]*")]


def free_disk(folder: Path) -> int:
    """Return the bytes that may be written to a folder's disk; the folder need not exist yet."""
    return max(0, shutil.disk_usage(existing_part(folder)).free - _SPARE)


def same_disk(one: Path, other: Path) -> bool:
    """Whether two folders are on the same disk; they need not exist yet."""
    first, second = (existing_part(path.absolute()).stat().st_dev for path in (one, other))
    return first == second


def check_free_disk(folder: Path, needed: int, variable: str) -> None:
    """Raise NoRoomError unless the disk of `folder`, set by `variable`, has `needed` bytes free."""
    parent = existing_part(folder)
    free = shutil.disk_usage(parent).free
    if free < needed + _SPARE:
        finder = " (Finder's figure includes what macOS has yet to free)"
        wanted = human_size(needed + _SPARE)
        raise NoRoomError(
            f"it needs {wanted} of disk and {parent} has {human_size(free)} free"
            f"{finder if sys.platform == 'darwin' else ''}; make room, or set {variable} to a "
            f"folder on another disk"
        )


def human_size(n: int) -> str:
    """Format a number of bytes in powers of 1000: `98 MB`, `13.5 GB`."""
    if n < 1000:
        return f"{n} bytes"
    if n < 999_500_000:
        return f"{n / 1000**2:.0f} MB" if n >= 999_500 else f"{n / 1000:.0f} kB"
    return f"{n / 1000**3:.1f} GB"
