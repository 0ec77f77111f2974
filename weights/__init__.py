"""Find or download a model's files by its name, check them, and load model and tokenizer.

`fetching` finds or downloads files, `gguf` and `load_folder` read them, `precision` converts the
weights, `text` encodes messages and reads answers. Nothing here depends on speculative decoding.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from redrafter_mlx.runtime.files.paths import human_size

LOG = logging.getLogger(__name__)

SHIPPED_DRAFTERS = Path(__file__).parent / "drafters"
"""Folder of the drafters that come with the package."""

Progress = Callable[[str, int, "int | None"], None]
"""Callback with (label, bytes done, total bytes or None if unknown), called any number of times."""


def no_progress(label: str, done: int, total: int | None) -> None:
    """Ignore progress."""


DOWNLOADING = "downloading "
"""Start of a download's label."""

LOGGED_BYTES, _LOGGED_SECONDS = 10_000_000, 30.0
"""Minimum size of a download that is logged at its start; seconds between later lines."""


def log_progress(clock: Callable[[], float] = time.monotonic) -> Progress:
    """Return a callback for programs without bars: it logs large downloads, and long work.

    Warnings, since a program that configures no logging shows nothing else.
    """
    logged: dict[str, float] = {}

    def report(label: str, done: int, total: int | None) -> None:
        name = "".join(c if c.isprintable() else "?" for c in label)
        if label not in logged:
            logged[label] = clock()
            if label.startswith(DOWNLOADING) and (total or 0) >= LOGGED_BYTES:
                LOG.warning("%s (%s)", name, human_size(total or 0))
        elif clock() - logged[label] >= _LOGGED_SECONDS:
            logged[label] = clock()
            whole = "" if total is None else f" of {human_size(total)}"
            LOG.warning("%s: %s%s", name, human_size(done), whole)

    return report
