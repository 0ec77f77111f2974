"""Whole texts of a corpus as batches for EAGLE, in an order that depends only on a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.forms.eagle_unrolled import Sequences

PADDED = 2
"""Maximum number of positions of a batch, as a multiple of its maximum number of answer tokens."""

_LEAST_TOKENS = 3
"""Minimum tokens of a text with a draft: a position with features, the root, a token after it."""


def grouped(texts: Sequence[Text], size: int, seed: str) -> list[list[Text]]:
    """Return groups of texts of similar length, each with at most `size` answer tokens.

    With prompts and padding, a group takes at most twice as many positions. A longer text forms a
    group alone.
    """
    drawn = random.Random(seed)
    usable = [text for text in texts if _length(text) >= _LEAST_TOKENS]
    usable.sort(key=lambda text: _length(text) * drawn.uniform(0.9, 1.1))
    groups: list[list[Text]] = []
    longest = answers = 0
    for text in usable:
        longest, answers = max(longest, _length(text)), answers + len(text.answer)
        if not groups or answers > size or longest * (len(groups[-1]) + 1) > PADDED * size:
            groups.append([])
            longest, answers = _length(text), len(text.answer)
        groups[-1].append(text)
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
    S, T = max(_length(text) for text in texts) - 1, length
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
        mx.array(states[..., -hidden_size:]),
        mx.array(row.astype(np.int32)),
        mx.array(tokens[(row // S)[:, None], np.minimum(label_at, S + T - 1)]),
        mx.array(valid),
        mx.array(np.concatenate(hard)),
    )


def _length(text: Text) -> int:
    return len(text.prompt) + len(text.answer)
