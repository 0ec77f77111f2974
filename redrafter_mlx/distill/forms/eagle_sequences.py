"""Whole texts of a corpus as batches for EAGLE, in an order that depends on a seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.forms.eagle_unrolled import Sequences

_LEAST_TOKENS = 3
"""A shorter text has no draft: one position with features, the root, and a token after it."""


def grouped(texts: Sequence[Text], size: int, seed: str) -> Iterator[list[Text]]:
    """Groups of texts of nearly one length, with about `size` positions each."""
    drawn = random.Random(seed)
    usable = [text for text in texts if _length(text) >= _LEAST_TOKENS]
    usable.sort(key=lambda text: _length(text) * drawn.uniform(0.9, 1.1))
    groups: list[list[Text]] = []
    longest = 0
    for text in usable:
        longest = max(longest, _length(text))
        if not groups or longest * (len(groups[-1]) + 1) > size:
            groups.append([])
            longest = _length(text)
        groups[-1].append(text)
    drawn.shuffle(groups)
    yield from groups


def pad_together(
    texts: Sequence[Text], length: int, hidden_size: int, *, prompts: bool
) -> Sequences:
    """Texts with the states of their prompts as one batch, with `length` labels after each root.

    prompts: whether drafts are trained within the prompts too, on soft labels alone

    Of the text  how are you | I am fine  (prompt | answer) with length 2:

        position  token  root   labels
        0         how    are    you   I
        1         are    you    I     am
        2         you    I      am    fine
        3         I      am     fine  -
        4         am     fine   -     -
    """
    S, T = max(_length(text) for text in texts) - 1, length
    wide = _states(texts[0]).shape[1]
    tokens = np.zeros((len(texts), S + T), np.int32)
    states = np.zeros((len(texts), S, wide), np.float32)
    rows, ahead, ends, hard = [], [], [], []
    for b, text in enumerate(texts):
        whole = [*text.prompt, *text.answer.tolist()]
        tokens[b, : len(whole)] = whole
        states[b, : len(whole) - 1] = _states(text)
        first = 0 if prompts else len(text.prompt) - 1
        at = np.arange(first, len(whole) - 2)
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


def _states(text: Text) -> np.ndarray:
    """[prompt + answer - 1, C]: what chose each token from the second on."""
    parts = [text.states] if text.layer_inputs is None else [text.layer_inputs, text.states]
    answer = np.concatenate(parts, axis=1)
    if text.prompt_states is None:
        raise ValueError("EAGLE is trained on whole texts; the states of a prompt are missing")
    return np.concatenate([text.prompt_states, answer])
