"""A small grammar in plain Python, for tests of the effect of constraints on decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from redrafter_mlx.errors import BadInputError

Rule = Callable[[tuple[int, ...]], set[int]]
"""The tokens that may follow the emitted ones."""


class Rules:
    """A constraint given by a rule, which is evaluated again for every text.

    masked: number of calls of `masks`
    """

    def __init__(self, rule: Rule, vocab_size: int, length: int = 10**6) -> None:
        """Set the rule; the answer ends after `length` tokens."""
        self._rule, self._vocab_size, self._length = rule, vocab_size, length
        self.text: tuple[int, ...] = ()
        self.masked = 0

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> NDArray[np.int32] | None:
        self.masked += 1
        if not self._rule(self.text):
            raise BadInputError(f"no token may follow {self.text}")
        bits = np.zeros((len(tokens), -(-self._vocab_size // 32) * 32), np.uint8)
        paths: list[tuple[int, ...] | None] = [self.text]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            before = paths[parent] if parent >= 0 else None
            right = before is not None and token in self._rule(before)
            paths.append((*before, token) if before is not None and right else None)
        for node, path in enumerate(paths):
            allowed = self._rule(path) if path is not None else set()
            bits[node, list(allowed or range(self._vocab_size))] = 1
        return np.packbits(bits, axis=1, bitorder="little").view(np.int32)

    def forced(self) -> list[int]:
        found: list[int] = []
        while len(allowed := self._rule((*self.text, *found))) == 1 and len(found) < 40:
            found += allowed
        return found

    def advance(self, token: int) -> None:
        if token not in self._rule(self.text):
            raise BadInputError(f"no token may follow {self.text}")
        self.text = (*self.text, token)

    @property
    def ended(self) -> bool:
        return len(self.text) >= self._length


def phrases(vocab_size: int) -> Rule:
    """Free tokens; each one below a third of the vocabulary is followed by a fixed run of four."""
    third = vocab_size // 3

    def rule(text: tuple[int, ...]) -> set[int]:
        start = next((i for i in range(1, 5) if i <= len(text) and text[-i] < third), None)
        if start is None:
            return {t for t in range(vocab_size) if (t + len(text)) % 3}
        return {third + (7 * text[-start] + 5 * start) % (vocab_size - third)}

    return rule
