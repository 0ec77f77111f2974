"""The text so far as an array on the device, for what drafts from it.

Positions are those of the text: the prompt's first token is at 0. What stands behind the last
token emitted means nothing. A step copies the buffer, because the drafts of the step before may
still be reading it; that is four bytes a token, where a row of keys and values is thousands.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from redrafter_mlx.rows import round_up

TEXT_STEP = 256
"""Buffers grow by this many tokens, so that shapes change rarely."""


def begin_text(prompts: Sequence[Sequence[int]]) -> mx.array:
    """The prompts [B, C] int32, padded behind."""
    capacity = round_up(max(map(len, prompts)) + 1, TEXT_STEP)
    return mx.array([[*row, *[0] * (capacity - len(row))] for row in prompts], mx.int32)


def extend_text(text: mx.array, emitted: mx.array, start: mx.array, bound: int) -> mx.array:
    """The text with a step's tokens written from place `start` on.

    Args:
      bound: the most that `start` can be
    Shapes:
      text:    [B, C] int32
      emitted: [B, L] int32, some of which may mean nothing: the next step writes over those
      start:   [B] int32
    Returns:
      [B, C'] int32, C' >= bound + L
    """
    B, L = emitted.shape
    missing = round_up(bound + L, TEXT_STEP) - text.shape[1]
    if missing > 0:
        text = mx.pad(text, [(0, 0), (0, missing)])
    emitted = emitted.astype(mx.int32)
    if B == 1:
        return mx.slice_update(text, emitted, start, axes=(1,))
    return mx.put_along_axis(text, start[:, None] + mx.arange(L)[None], emitted, axis=1)
