"""What of the target's writing is worth learning from.

The greedy answers of a small model fall into loops that anything predicts. Learnt from, they
make a drafter look better than it is on text that people ask for; so an answer is cut where it
begins to repeat itself.
"""

from __future__ import annotations

from collections.abc import Sequence

LOOP_WINDOW = 20
"""An answer that says so many tokens a second time has fallen into a loop."""

MIN_ANSWER = 4
"""Tokens that an answer must have to be learnt from."""


def loop_start(tokens: Sequence[int], window: int = LOOP_WINDOW) -> int | None:
    """Where the first run of `window` tokens begins that was said before; None if none does."""
    seen: dict[tuple[int, ...], int] = {}
    for i in range(len(tokens) - window + 1):
        run = tuple(tokens[i : i + window])
        if run in seen:
            return i
        seen[run] = i
    return None
