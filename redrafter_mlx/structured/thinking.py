"""A limit on the tokens of the reasoning, after which the mark at its end is forced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from redrafter_mlx.decoding.constraint import WORD, Constraint, Masks, mask_words


@dataclass(frozen=True)
class ThinkingBudget:
    """A limit on reasoning whose marks are single tokens.

    tokens: maximum number, without the marks
    start, end: the marks; without `start` only the prompt can begin the reasoning
    begun:  whether the prompt has begun it
    """

    tokens: int
    start: int | None
    end: int
    begun: bool

    def after(self, left: int | None, token: int) -> int | None:
        """Return how many tokens the reasoning may still have after this one; None outside."""
        if token == self.end:
            return None
        if token == self.start:
            return self.tokens
        return None if left is None else max(left - 1, 0)


class BoundedThinking:
    """The state of one answer with a limit on its reasoning; see `decoding.constraint.Constraint`.

    Where nothing is left, only the mark at the end may follow. The answer's own grammar, if there
    is one, allows that mark anywhere in the reasoning.
    """

    def __init__(self, budget: ThinkingBudget, inner: Constraint | None, vocab_size: int) -> None:
        """`inner` is the grammar; `vocab_size` is the size of the model's logits."""
        self._budget, self._inner = budget, inner
        self._left = budget.tokens if budget.begun else None
        self._only_end = np.zeros(mask_words(vocab_size), np.int32)
        self._only_end.view(np.uint32)[budget.end // WORD] = np.uint32(1 << budget.end % WORD)

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Masks | None:
        masks = None if self._inner is None else self._inner.masks(tokens, parents)
        left = [self._left]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            left.append(self._budget.after(left[parent], token) if parent >= 0 else None)
        if 0 in left and masks is None:
            masks = np.full((len(left), self._only_end.size), -1, np.int32)
        if masks is not None:
            masks[[node for node, n in enumerate(left) if n == 0]] = self._only_end
        return masks

    def forced(self) -> Sequence[int]:
        if self._left == 0:
            return [self._budget.end]
        return () if self._inner is None else self._inner.forced()

    def advance(self, token: int) -> None:
        if self._inner is not None:
            self._inner.advance(token)
        self._left = self._budget.after(self._left, token)

    @property
    def ended(self) -> bool:
        return self._inner is not None and self._inner.ended
