"""Constraints: which tokens may come next, at every node of a tree.

A grammar masks the target's logits after each node by the text on that node's own path, so drafts
stay on and every acceptance method stays exact for the constrained target: what is chosen after a
node is what would be chosen there without drafts. The masks follow from the drafted tokens, which
the host must read: one more transfer a step, while the target verifies.

    grammar   { "a": 1 }  or  { "b": 2 }         forced drafts   {  "
    tree      { -+- "a   allowed after it  "     after  { "      a, b
                 `- x    the grammar has no x: never chosen, whatever follows is not looked at
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from redrafter_mlx.drafting.prompt_lookup import Copy, CopySource
from redrafter_mlx.speculation.tree import TokenTree

WORD = 32
"""Tokens in one integer of a mask."""

Masks = NDArray[np.int32]


class Constraint(Protocol):
    """The grammar of one answer and how far the answer has come; used by one thread at a time."""

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Masks | None:
        """The tokens that are allowed after each node of a tree.

        Shapes:
          tokens:  [N]; node 0 is the root, which was emitted, or is the prompt's last token
          parents: [N], parents[i] < i; -1 at the root and at padding
        Returns:
          [N, ceil(V / 32)] int32, bit t % 32 of integer t // 32 is token t; any where the path is
          not in the grammar or ends where nothing may follow, and at padding. None allows
          everything
        Raises:
          BadInputError: if no token may follow the root
        """
        ...

    def forced(self) -> Sequence[int]:
        """The tokens that must come next, as far as there is one way only; a hint for drafting."""
        ...

    def advance(self, token: int) -> None:
        """Take note of a token that was emitted.

        Raises BadInputError if it is not in the grammar: nothing could follow the token before it.
        """
        ...

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, and nothing but its end could follow."""
        ...


def allowed_tokens(
    constraints: Sequence[Constraint | None], tree: TokenTree, vocab_size: int
) -> mx.array | None:
    """The masks [B, N, ceil(V / 32)] of each batch row's constraint; None if all is allowed.

    Reads the tree: the one transfer that constraints cost.
    """
    B, N = tree.tokens.shape
    masks = np.full((B, N, -(-vocab_size // WORD)), -1, np.int32)
    free = True
    nodes: list[list[list[int]]] = mx.stack([tree.tokens, tree.parents], axis=1).tolist()  # type: ignore[assignment]
    for row, constraint in enumerate(constraints):
        allowed = None if constraint is None else constraint.masks(*nodes[row])
        if allowed is not None:
            masks[row], free = allowed, False
    return None if free else mx.array(masks)


def constrained(logits: mx.array, masks: mx.array | None) -> mx.array:
    """Logits [B, N, V], -inf where a mask [B, N, ceil(V / 32)] has no bit."""
    if masks is None:
        return logits
    B, N, V = logits.shape
    bits = (masks[..., None] >> mx.arange(WORD)) & 1  # [B, N, V / 32, 32]
    return mx.where(bits.reshape(B, N, -1)[..., :V] == 1, logits, -mx.inf)


class ForcedCopies:
    """What a grammar forces as a draft that is certain, continued by the text's own copy."""

    def __init__(self, constraint: Constraint, text: CopySource | None) -> None:
        self._constraint, self._text = constraint, text

    def copies(self, width: int, length: int) -> list[Copy]:
        """As `TextIndex.copies`; where tokens are forced, the one candidate that has them."""
        found = [] if self._text is None else self._text.copies(width, length)
        forced = tuple(self._constraint.forced()[:length])
        if not forced:
            return found
        rest = length - len(forced)
        best = Copy(forced + (0,) * rest, (-math.inf,) * length)
        best = next((copy for copy in found if copy.tokens[: len(forced)] == forced), best)
        certain = best.log_probs[len(forced) - 1]
        after = (p - certain if math.isfinite(p) else p for p in best.log_probs[len(forced) :])
        return [Copy(best.tokens, (0.0,) * len(forced) + tuple(after), length)]
