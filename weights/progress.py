"""How downloads say how far they are."""

from __future__ import annotations

from collections.abc import Callable

from huggingface_hub.utils.tqdm import tqdm

Progress = Callable[[str, int, "int | None"], None]
"""Called with (label, bytes done, bytes in all or None where unknown), any number of times."""


def no_progress(label: str, done: int, total: int | None) -> None:
    """The progress of those who asked for none."""


def tqdm_reporting(progress: Progress, label: str) -> type[tqdm]:
    """A tqdm class that draws nothing and reports to `progress`; what huggingface-hub takes."""

    class Reporting(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            total, initial = kwargs.get("total"), kwargs.get("initial")
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)
            self._all = int(total) if isinstance(total, (int, float)) else None
            self._done = int(initial) if isinstance(initial, (int, float)) else 0
            progress(label, self._done, self._all)

        def update(self, n: float | None = 1) -> bool | None:
            self._done += int(n or 0)
            progress(label, self._done, self._all)
            return None

    return Reporting
