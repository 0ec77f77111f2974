"""States of layers at some positions of a text, at which a later prompt can leave it.

Keys and values of a prefix are those of a longer text. A recurrent state is that of one position
alone, and a layer with a sliding window keeps no keys before it. So a prefix can be reused only up
to a position where the state was kept, or the window: at the end of each answer, shortly before the
end of each prompt, every few thousand tokens of a long prompt, and where an earlier prompt was seen
to part from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from redrafter_mlx.target_model.recurrent.state_cache import States

CHANGED_END = 8
"""Maximum number of tokens at the end of a prompt that the next turn's prompt may not repeat."""

_EVERY = 2048
"""Minimum number of prompt tokens from one checkpoint to the next."""

_WINDOWS = 8
"""Number of windows from one checkpoint to the next: each is as large as the keys of a window."""

_READ_AGAIN = 512
"""Number of tokens of a prompt that are rather read again than kept in windows."""

_MIN_SAVED = 64
"""Number of tokens for which a checkpoint is worth a call of its own: fewer are read in one."""

_MAX_KEPT = 16
"""Maximum number of checkpoints of one text: each is as large as hundreds of tokens' keys."""


class Checkpoint(NamedTuple):
    """The states of all layers after the text's first `position` tokens."""

    position: int
    states: States

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for layer in self.states for a in layer)

    @property
    def buffers(self) -> int:
        """Number of arrays."""
        return sum(map(len, self.states))


def stops(start: int, length: int, parted: int, window: int = 0) -> list[int]:
    """Return the positions at which to keep the states of a prompt that is read from `start` on.

    parted: number of tokens that it shares with an earlier prompt
    window: the largest sliding window, if its keys are all that is kept; 0 for recurrent states
    """
    if window and length <= _READ_AGAIN:
        return []
    every = max(_EVERY, _WINDOWS * window)
    at = {*range((start // every + 1) * every, length, every), length - CHANGED_END, parted}
    return sorted(i for i in at if i - start >= _MIN_SAVED and i < length)


def merged(checkpoints: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return one checkpoint for each position, in order; of many, those that are far apart."""
    kept = sorted({each.position: each for each in checkpoints}.values())
    while len(kept) > _MAX_KEPT:
        gaps = [kept[i + 1].position - kept[i - 1].position for i in range(1, len(kept) - 1)]
        del kept[1 + gaps.index(min(gaps))]
    return tuple(kept)
