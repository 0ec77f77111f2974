"""Prompts of a batch of texts, read into mlx-lm's caches.

Rows are padded on the left, so that all of them write the same cache slot. Prompts of a model with
recurrent states, which padding would become a part of, are read one by one and joined afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache

from redrafter_mlx.distill.corpus.hidden_states import to_host
from redrafter_mlx.target_model.model import Target

CACHE_STEP = 32
"""Number of cache slots by which a batch's cache grows."""

_PREFILL_TOKENS = 8192  # maximum number of tokens in one prefill call, which bounds memory


class EvenCache(BatchKVCache):  # type: ignore[misc]
    """mlx-lm's batched cache, of which attention reads all slots, those not written yet masked out.

    So attention has the same extent for `step` tokens. A GPU's library plans anew for each extent,
    which took longer than the call.
    """

    step = CACHE_STEP
    keys: Any
    values: Any

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the next slots, [B, K, N, D] each, and return all slots."""
        n = self._idx
        if self.keys is not None and n + keys.shape[2] > self.keys.shape[2]:
            self.keys, self.values = self.keys[..., :n, :], self.values[..., :n, :]
        super().update_and_fetch(keys, values)
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        """Return the mask [B, 1, N, slots] for the next N slots."""
        mask = super().make_mask(N, return_array, **kwargs)
        slots = 0 if self.keys is None else self.keys.shape[2]
        if self._idx + N > slots:
            slots = self._idx + -(-N // self.step) * self.step
        unwritten = slots - mask.shape[-1]
        return mx.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, unwritten)])


class ReadPrompts(NamedTuple):
    """Caches of a batch's layers, and the states of its prompts."""

    cache: list[Any]
    hidden: mx.array  # [B, C], the last ones
    # of each prompt if they are kept, those that chose its tokens from the second on
    states: list[np.ndarray]


def read_prompts(
    target: Target, prompts: Sequence[list[int]], keep_states: bool = True
) -> ReadPrompts:
    """Read prompts as one batch; one prompt alone if the target takes no row masks."""
    if not target.row_masks:
        return _read(target, prompts, target.mlx_lm_caches(), keep_states)
    if not target.states:
        caches = [EvenCache(_padding(prompts)) for _ in target.mlx_lm_caches()]
        return _read(target, prompts, caches, keep_states)
    parts = [_read(target, [one], target.mlx_lm_caches(), keep_states) for one in prompts]
    layers = zip(*(part.cache for part in parts), strict=True)
    kinds = [(EvenCache if isinstance(rows[0], KVCache) else ArraysCache, rows) for rows in layers]
    return ReadPrompts(
        [kind.merge(rows) for kind, rows in kinds],
        mx.concatenate([part.hidden for part in parts]),
        [states for part in parts for states in part.states],
    )


def _read(
    target: Target, prompts: Sequence[list[int]], cache: list[Any], keep_states: bool
) -> ReadPrompts:
    padding = _padding(prompts)
    padded = mx.array([[0] * n + prompt for n, prompt in zip(padding, prompts, strict=True)])
    columns, seen = max(1, _PREFILL_TOKENS // len(prompts)), []
    for at in range(0, padded.shape[1], columns):
        hidden = target.hidden(padded[:, at : at + columns], cache)
        last = hidden[:, -1]
        mx.eval(last, [layer.state[:2] for layer in cache])
        if keep_states:
            seen.append(to_host(hidden))
    rows: Sequence[np.ndarray] = [*np.concatenate(seen, axis=1)] if seen else []
    return ReadPrompts(
        cache, last, [row[n:-1] for row, n in zip(rows, padding, strict=keep_states)]
    )


def _padding(prompts: Sequence[list[int]]) -> list[int]:
    width = max(map(len, prompts))
    return [width - len(prompt) for prompt in prompts]
