"""Keeping answers as they end: what the engine hands over is written in another thread."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from redrafter_mlx.learning.folder import LearningFolder
from redrafter_mlx.learning.kept_texts import MAX_BYTES, KeptText, TextStore
from redrafter_mlx.runtime.files.paths import human_size

LOG = logging.getLogger("redrafter_mlx.learning")

_MIN_TOKENS, _MAX_TOKENS = 8, 8192
"""Minimum number of tokens of an answer that is kept, and the maximum with its prompt: to learn,
the model reads all of it at once."""

_SECRETS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\bsk-[\w-]{20,}|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bxox[abprs]-[\w-]{10,}|\bhf_[A-Za-z]{20,}|\bglpat-[\w-]{20,}"
    r"|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.|\bAIza[\w-]{35}"
)
"""What keys and tokens of common services look like."""


class TextKeeper:
    """Keeps the answers of one model.

    folder: where
    """

    def __init__(
        self,
        model: str,
        fingerprint: str,
        decode: Callable[[Sequence[int]], str],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Create the folder; the first time, the log says what is kept and where.

        decode: turns tokens into text, in which secrets are looked for

        Raises BadInputError if nothing can be kept.
        """
        self.folder, self._decode = LearningFolder.of(fingerprint), decode
        create = partial(self.folder.create, model, fingerprint)
        if create():
            LOG.warning(
                "answers are kept from now on, with their prompts, for `redrafter-mlx learn`: at "
                "most %s of %s, on this machine alone\n"
                "they are in %s, which only you can read; `redrafter-mlx learn --forget` removes "
                "them",
                human_size(max_bytes), model, self.folder.path,
            )  # fmt: skip
        self._store = TextStore(self.folder.texts, max_bytes, create)
        self._writer = ThreadPoolExecutor(1, "kept-texts")
        self._fails, self._earlier, self._added = False, -1, 0

    def keep(self, prompt: Sequence[int], answer: Sequence[int], temperature: float) -> None:
        """Keep an answer unless it is very short or very long, or seems to hold a secret.

        It returns at once.
        """
        if len(answer) >= _MIN_TOKENS and len(prompt) + len(answer) <= _MAX_TOKENS:
            text = KeptText(tuple(prompt), tuple(answer), temperature, time.time())
            self._writer.submit(self._write, text)

    @property
    def kept(self) -> int:
        """Number of answers that are kept, those of earlier processes included.

        It waits until the last ones are written.
        """
        with suppress(RuntimeError):  # it is closed, and all is written
            self._writer.submit(int).result()
        if self._earlier < 0:  # counted once: that reads the files
            self._earlier = self._store.count() - self._added
        return self._earlier + self._added

    def close(self) -> None:
        """Wait until all is written."""
        self._writer.shutdown()

    def _write(self, text: KeptText) -> None:
        """Write a text; where that fails, the log says so once, and the answer is not kept."""
        try:
            if not holds_secret(self._decode([*text.prompt, *text.answer])):
                self._store.append(text)
                self._added += 1
        except Exception as error:  # a tokenizer may raise anything
            if not self._fails:
                LOG.warning("an answer is not kept: %s", error)
            self._fails = True


def holds_secret(text: str, known: Collection[str] | None = None) -> bool:
    """Whether a text holds what looks like a key, or one that is known: by default this server's.

    No pattern finds all secrets.
    """
    mine = (os.environ.get("REDRAFTER_API_KEY", ""),) if known is None else known
    return _SECRETS.search(text) is not None or any(key in text for key in mine if key)
