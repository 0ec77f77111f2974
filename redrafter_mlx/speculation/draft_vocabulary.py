"""The tokens that a drafter can draft, which may be fewer than the target's."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class DraftVocabulary:
    """Maps the outputs of a drafter to tokens.

    size:       V', number of outputs
    vocab_size: V, of the target
    tokens:     [V'] int32, the token of each output; None if outputs are token ids
    """

    size: int
    vocab_size: int
    tokens: mx.array | None = None

    def __post_init__(self) -> None:
        mx.eval(self.tokens)  # another thread drafts, and could not evaluate it

    @classmethod
    def most_frequent(cls, size: int, counts: np.ndarray) -> DraftVocabulary:
        """Return the `size` tokens with the highest `counts` [V], the lower ids of equal ones."""
        tokens = choose_vocabulary(counts, size)
        first = tokens[-1] == size - 1  # whose rows of an output layer need no copy
        return cls(size, len(counts), None if first else mx.array(tokens))

    @property
    def rows(self) -> mx.array | slice | None:
        """Index of its tokens' rows in an output layer over all tokens; None for all of them."""
        if self.tokens is None:
            return slice(self.size) if self.size < self.vocab_size else None
        return self.tokens

    @property
    def share(self) -> float:
        """The share of the target's tokens that can be drafted."""
        return self.size / self.vocab_size

    def to_tokens(self, outputs: mx.array) -> mx.array:
        """Map output indices to token ids."""
        return outputs if self.tokens is None else self.tokens[outputs]

    def of_tokens(self, values: mx.array) -> mx.array:
        """Gather values [..., V] of all tokens for the outputs [..., V']."""
        return values[..., : self.size] if self.tokens is None else values[..., self.tokens]

    def index(self) -> mx.array:
        """Return [V] int32: the output of each token, -1 for tokens that cannot be drafted."""
        index = mx.full((self.vocab_size,), -1, mx.int32)
        outputs = mx.arange(self.size, dtype=mx.int32)
        index[outputs if self.tokens is None else self.tokens] = outputs
        return index

    def over_vocabulary(self, log_probs: mx.array) -> mx.array:
        """Map log-probabilities [..., V'] to [..., V]; -inf for tokens that cannot be drafted."""
        if self.tokens is None:
            missing = [(0, 0)] * (log_probs.ndim - 1) + [(0, self.vocab_size - self.size)]
            return mx.pad(log_probs, missing, constant_values=-mx.inf)
        everything = mx.full((*log_probs.shape[:-1], self.vocab_size), -mx.inf)
        index = mx.broadcast_to(self.tokens, log_probs.shape)
        return mx.put_along_axis(everything, index, log_probs, axis=-1)


def choose_vocabulary(counts: np.ndarray, size: int) -> np.ndarray:
    """Return the `size` most frequent tokens, in order of their ids."""
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def renew_vocabulary(tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return as many tokens [V'], with those that occur more than once in place of unused ones.

    Of the tokens that do not occur, those with the largest ids leave first: in vocabularies made by
    merging, they are rare anywhere.

    counts: [V], how often each token occurs
    """
    missing = np.setdiff1d(np.flatnonzero(counts > 1), tokens)
    missing = missing[np.argsort(-counts[missing], kind="stable")]
    unused = np.sort(tokens[counts[tokens] == 0])[::-1][: len(missing)]
    kept = np.setdiff1d(tokens, unused)
    return np.sort(np.concatenate([kept, missing[: len(unused)]])).astype(np.int32)
