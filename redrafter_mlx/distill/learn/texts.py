"""Which kept texts are learned from, and which ones the drafter is judged on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from redrafter_mlx.distill.corpus.filters import MIN_ANSWER, loop_start
from redrafter_mlx.learning.kept_texts import KeptText

_ONE_IN = 8
"""One of the user's prompts in this many is for judging, never for training."""


@dataclass(frozen=True)
class Split:
    """Texts by their use, the newest first."""

    training: list[KeptText]
    held_out: list[KeptText]

    @property
    def newest(self) -> float:
        """The time of the newest text, 0 without any."""
        return max((text.time for text in (*self.training, *self.held_out)), default=0.0)

    def __len__(self) -> int:
        return len(self.training) + len(self.held_out)


def split(texts: Iterable[KeptText], one_in: int = _ONE_IN) -> Split:
    """Divide texts by the digests of their prompts, each text once.

    A prompt is on the same side in every run, so that none is trained on and judged with later. Of
    a few texts, the prompt with the smallest digest is held out. An answer is cut where it begins
    to repeat itself; one that is very short then is left out.
    """
    usable = dict.fromkeys(filter(None, map(_cut, texts)))
    newest_first = sorted(usable, key=lambda text: -text.time)
    digests = {text.prompt: _digest(text.prompt) for text in newest_first}
    smallest = min(digests.values(), default=0)
    sides: tuple[list[KeptText], list[KeptText]] = [], []
    for text in newest_first:
        digest = digests[text.prompt]
        sides[digest % one_in == 0 or digest == smallest].append(text)
    return Split(*sides)


def interleaved(first: Sequence[KeptText], second: Sequence[KeptText]) -> list[KeptText]:
    """Return all texts, each of both in its order, so that any beginning has its share of both."""
    placed = [
        ((at + 1) / len(texts), text) for texts in (first, second) for at, text in enumerate(texts)
    ]
    return [text for _, text in sorted(placed, key=lambda pair: pair[0])]


def up_to(texts: Sequence[KeptText], positions: int) -> list[KeptText]:
    """Return the first texts, of about so many answer tokens together; at least one if any."""
    found = list[KeptText]()
    for text in texts:
        if positions <= 0:
            break
        found.append(text)
        positions -= len(text.answer)
    return found


def _cut(text: KeptText) -> KeptText | None:
    """Return a text without its loop; None if too little is left."""
    end = loop_start(text.answer)
    answer = text.answer[:end]
    return replace(text, answer=answer) if len(answer) >= MIN_ANSWER else None


def _digest(prompt: Sequence[int]) -> int:
    return int.from_bytes(hashlib.sha256(np.array(prompt, np.int64).tobytes()).digest()[:8], "big")
