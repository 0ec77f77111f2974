"""Borrowed layers over the places of a batch, each looking back over its own text."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.target.borrow import BorrowedLayers, LookBack


class TextRows(NamedTuple):
    """What borrowed layers keep of the texts that a batch's places are in.

    A batch's P places are B runs of consecutive ones, each within one text.

    Shapes:
      layers: for each layer keys and values [B, K, R, head size], padded behind
      start:  [B] int32, where the root of a run's first place stands in its text
      gather: [B, A] int32, the run's places among the batch's, padded with its last
      back:   [P] int32, each place among B * A
    """

    layers: tuple[tuple[mx.array, mx.array], ...]
    start: mx.array
    gather: mx.array
    back: mx.array


def over_texts(borrowed: BorrowedLayers, rows: TextRows) -> LookBack:
    """For one guess [P, D] or several [P, W, D] at each place of a batch."""
    B, A = rows.gather.shape
    dtype = borrowed.dtype
    layers = [(keys.astype(dtype), values.astype(dtype)) for keys, values in rows.layers]
    position = rows.start[:, None] + mx.arange(A)[None]  # [B, A], of the roots
    before = mx.arange(layers[0][0].shape[2])[None, None] < position[:, :, None]  # [B, A, R]

    def look_back(x: mx.array, level: int) -> mx.array:
        W = 1 if x.ndim == 2 else x.shape[1]
        by_text = x[rows.gather].reshape(B, A * W, x.shape[-1])
        if W == 1:
            offset, mask = rows.start + (level - 1), before[:, None]
        else:
            offset = mx.repeat(position + (level - 1), W, axis=1)
            mask = mx.repeat(before, W, axis=1)[:, None]
        out = borrowed(by_text, layers, offset, mask)
        return out.reshape(B * A, W, x.shape[-1])[rows.back].reshape(x.shape)

    return look_back
