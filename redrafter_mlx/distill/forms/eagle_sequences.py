"""Whole texts of a corpus as batches for EAGLE and MTP, and the drafter unrolled over them.

EAGLE-3 (arXiv 2503.01840), section 3.2, training-time test: at depth 0 each position of a text has
a true row, whose context is the target's features. At every later depth it has one more row, with
the text's next token. The context of that row is the drafter's own output at the previous depth. So
the drafter is trained on the same rows that it computes when it drafts, at all positions in a few
calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.drafting.published.heads.feature_drafter import FeatureNetwork
from redrafter_mlx.target_model.cache.slots import windowed

PADDED = 2
"""Maximum number of positions of a batch, as a multiple of its maximum number of answer tokens."""

_MIN_TOKENS = 3
"""Minimum tokens of a text with a draft: a position with features, the root, a token after it."""


class Sequences(NamedTuple):
    """Whole texts, padded at the end to S positions with features, and T drafts after each.

    Shapes:
      tokens:   [B, S + T] int32
      features: [B, S, C], what the drafter reads from the target
      rows:     [M] int32, the positions that are trained on, text by text: b * S + i. The root of
                position i is its next token; its drafts come after the root
      states:   [M + T, D], the target's last hidden states there, which chose the roots; the last T
                are those of labels that are not valid
      labels, valid [M, T] and hard [M]: as in `Batch`
    """

    tokens: mx.array
    features: mx.array
    rows: mx.array
    states: mx.array
    labels: mx.array
    valid: mx.array
    hard: mx.array


def grouped(texts: Sequence[Text], size: int, seed: str) -> list[list[Text]]:
    """Return groups of texts of similar length, each with at most `size` answer tokens.

    With prompts and padding, a group takes at most twice as many positions; a longer text is alone.
    """
    lengths = [(len(text.prompt), len(text.answer)) for text in texts]
    return [[texts[i] for i in group] for group in group_lengths(lengths, size, seed)]


def group_lengths(lengths: Sequence[tuple[int, int]], size: int, seed: str) -> list[list[int]]:
    """Return the groups of `grouped` as indices, from the lengths of prompts and answers."""
    drawn = random.Random(seed)
    usable = [i for i, text in enumerate(lengths) if sum(text) >= _MIN_TOKENS]
    usable.sort(key=lambda i: sum(lengths[i]) * drawn.uniform(0.9, 1.1))
    groups: list[list[int]] = []
    longest = answers = 0
    for i in usable:
        length, answer = sum(lengths[i]), lengths[i][1]
        longest, answers = max(longest, length), answers + answer
        if not groups or answers > size or longest * (len(groups[-1]) + 1) > PADDED * size:
            groups.append([])
            longest, answers = length, answer
        groups[-1].append(i)
    drawn.shuffle(groups)
    return groups


def pad_together(
    texts: Sequence[Text], length: int, hidden_size: int, *, prompts: bool
) -> Sequences:
    """Pad texts, with their prompts' states, to one batch with `length` labels after each root.

    prompts: whether drafts are trained within the prompts too, on soft labels alone

    The text  how are you | I am fine  (prompt | answer)  with length 2 gives:

        position  token  root   labels
        0         how    are    you   I
        1         are    you    I     am
        2         you    I      am    fine
        3         I      am     fine  -
        4         am     fine   -     -
    """
    S, T = max(len(text.prompt) + len(text.answer) for text in texts) - 1, length
    wide = texts[0].whole_states.shape[1]
    tokens = np.zeros((len(texts), S + T), np.int32)
    states = np.zeros((len(texts), S, wide), np.float32)
    rows, ahead, ends, hard = [], [], [], []
    for b, text in enumerate(texts):
        whole = [*text.prompt, *text.answer.tolist()]
        tokens[b, : len(whole)] = whole
        states[b, : len(whole) - 1] = text.whole_states
        first = 0 if prompts else len(text.prompt) - 1
        at = np.arange(first, len(whole) - 1)
        rows.append(b * S + at)
        ahead.append(at[:, None] + np.arange(2, T + 2))
        ends.append(np.full(len(at), len(whole)))
        hard.append((at + 2 >= len(text.prompt)) & text.hard_labels)
    row, label_at = np.concatenate(rows), np.concatenate(ahead)  # [M], [M, T]
    valid = label_at < np.concatenate(ends)[:, None]
    return Sequences(
        mx.array(tokens),
        mx.array(states[..., :-hidden_size] if wide > hidden_size else states),
        mx.array(row.astype(np.int32)),
        mx.array(states[..., -hidden_size:].reshape(-1, hidden_size)[np.pad(row, (0, T))]),
        mx.array(tokens[(row // S)[:, None], np.minimum(label_at, S + T - 1)]),
        mx.array(valid),
        mx.array(np.concatenate(hard)),
    )


class UnrolledCache:
    """One layer's keys and values at all depths so far, with the interface of a KV cache.

    The row of position i at depth k has rotary position i + k. It attends to the true rows up to i,
    and at later depths only to the rows of position i. For three positions at depth 2:

        depth 0   1       2
        1 0 0   1 0 0   1 0 0
        1 1 0   0 1 0   0 1 0
        1 1 1   0 0 1   0 0 1
    """

    def __init__(self) -> None:
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []
        self.offset = 0

    def begin(self, depth: int) -> None:
        self.offset = depth

    def make_mask(
        self, n: int, *, return_array: bool = True, window_size: int | None = None
    ) -> mx.array:
        """Return [n, n * depths] bool, True = may attend."""
        del return_array  # it always is one
        own = mx.eye(n, dtype=mx.bool_)
        mask = mx.concatenate([mx.tri(n, dtype=mx.bool_), *[own] * self.offset], axis=1)
        return mask if window_size is None else windowed(mask, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add one depth; return all keys and values [B, K, n * depths, head size]."""
        self._keys.append(keys)
        self._values.append(values)
        return mx.concatenate(self._keys, axis=2), mx.concatenate(self._values, axis=2)


def unrolled_logits(
    network: FeatureNetwork,
    embedding: Callable[[mx.array], mx.array],
    head: Callable[[mx.array], mx.array],
    batch: Sequences,
) -> Iterator[mx.array]:
    """Yield logits [M, V'] float32 for each of the T drafts after `batch.rows`, fed with labels."""
    S, T = batch.features.shape[1], batch.labels.shape[1]
    caches = [UnrolledCache() for _ in network.layers]
    context = network.fuse(batch.features.astype(mx.float32))
    for depth in range(T):
        for cache in caches:
            cache.begin(depth)
        tokens = batch.tokens[:, depth + 1 : depth + 1 + S]
        hidden = network.forward(embedding(tokens).astype(context.dtype), context, caches)
        trained = hidden.reshape(-1, hidden.shape[-1])[batch.rows]
        yield head(network.normed(trained)).astype(mx.float32)
        context = network.feedback(hidden)
