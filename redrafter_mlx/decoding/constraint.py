"""Constraints: which tokens may come next, at every node of a tree.

A grammar masks the target's logits after each node by the text on that node's path. So drafts stay
on, and every acceptance method stays exact for the constrained target: the token chosen after a
node is the one that would be chosen there without drafts. The masks depend on the drafted tokens,
which the host must read: one more transfer a step, while the target verifies.

    grammar   { "a": 1 }  or  { "b": 2 }         forced drafts   {  "
    tree      { -+- "a   allowed after it  "     after  { "      a, b
                 `- x    not in the grammar: never chosen, and nothing after it is checked
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from redrafter_mlx.drafting.untrained.continuation import Continuation
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.speculation.tree import TokenTree

WORD = 32
"""Number of tokens per integer of a mask."""

Masks = NDArray[np.int32]


class Constraint(Protocol):
    """The grammar of one answer and its current state; used by one thread at a time."""

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Masks | None:
        """Return the tokens that are allowed after each node of a tree.

        Shapes:
          tokens:  [N]; node 0 is the root: the last token emitted, or the prompt's last token
          parents: [N], parents[i] < i; -1 at the root and at padding
        Returns:
          [N, ceil(V / 32)] int32, bit t % 32 of integer t // 32 is token t; undefined at padding
          and where the path is not in the grammar or nothing may follow it. None allows everything
        Raises:
          BadInputError: if no token may follow the root
        """
        ...

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next, up to the first choice; a hint for drafting."""
        ...

    def advance(self, token: int) -> None:
        """Record a token that was emitted.

        Raises BadInputError if it is not in the grammar: nothing could follow the token before it.
        """
        ...

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, so that only its end may follow."""
        ...


def allowed_tokens(
    constraints: Sequence[Constraint | None], tree: TokenTree, vocab_size: int
) -> mx.array | None:
    """Return each batch row's masks [B, N, ceil(V / 32)]; None if every token is allowed.

    Reads the tree on the host: the one transfer that constraints cost.
    """
    B, N = tree.tokens.shape
    masks = np.full((B, N, mask_words(vocab_size)), -1, np.int32)
    free = True
    nodes: list[list[list[int]]] = mx.stack([tree.tokens, tree.parents], axis=1).tolist()  # type: ignore[assignment]
    for row, constraint in enumerate(constraints):
        allowed = None if constraint is None else constraint.masks(*nodes[row])
        if allowed is not None:
            masks[row], free = allowed, False
    return None if free else mx.array(masks)


def mask_words(vocab_size: int) -> int:
    """Return ceil(V / 32), the number of integers in the mask of one node."""
    return -(-vocab_size // WORD)


def check_masks(masks: object, nodes: int, vocab_size: int) -> None:
    """Raise BadInputError for what a constraint must not return as the masks of `nodes` nodes."""
    if masks is None:
        return
    wanted = (nodes, mask_words(vocab_size))
    if not isinstance(masks, np.ndarray):
        raise BadInputError(
            f"the constraint's masks are of type {type(masks).__name__}; return a NumPy array"
        )
    if masks.shape != wanted or masks.dtype != np.int32:
        raise BadInputError(
            f"the constraint's masks are {masks.dtype} of shape {masks.shape}; they must be int32 "
            f"of shape {wanted}"
        )


def check_forced(tokens: object, vocab_size: int) -> None:
    """Raise BadInputError for what a constraint must not return as its forced tokens."""
    if not isinstance(tokens, Sequence):
        raise BadInputError(
            f"the constraint's forced tokens are {tokens!r:.80}; return a list of token ids"
        )
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise BadInputError(
                f"the constraint forces {token!r:.80}; token ids are whole, 0 to {vocab_size - 1}"
            )


def constrained(logits: mx.array, masks: mx.array) -> mx.array:
    """Return the logits [B, N, V], with -inf where a mask [B, N, ceil(V / 32)] has no bit."""
    B, N, V = logits.shape
    bits = (masks[..., None] >> mx.arange(WORD)) & 1  # [B, N, V / 32, 32]
    return mx.where(bits.reshape(B, N, -1)[..., :V] == 1, logits, -mx.inf)


def with_forced(
    constraint: Constraint, found: Sequence[Continuation], length: int
) -> list[Continuation]:
    """Return the continuations `found`, or the one that begins with the tokens that are forced.

    Forced tokens have probability 1. The best of `found` that begins with them continues them.
    """
    forced = tuple(constraint.forced()[:length])
    if not forced:
        return list(found)
    rest = length - len(forced)
    best = Continuation(forced + (0,) * rest, (-math.inf,) * length, "forced")
    best = next((one for one in found if one.tokens[: len(forced)] == forced), best)
    certain = best.log_probs[len(forced) - 1]
    after = (p - certain if math.isfinite(p) else p for p in best.log_probs[len(forced) :])
    log_probs = (0.0,) * len(forced) + tuple(after)
    return [Continuation(best.tokens, log_probs, "forced")]
