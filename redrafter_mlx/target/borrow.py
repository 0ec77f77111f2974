"""Layers of the target that a drafter borrows, and what they remember of the text.

A drafter that sees one hidden state knows little of what was said before it. The target's own
late layers know how to look: they keep keys and values of the whole text, and attend to them. A
drafter that hands its guess of such a layer's input to the layer itself, behind the rows that are
in the cache already, looks back over the text at the price of that one layer, learns from far
less text, and stores no weight for it. (GliDe, arXiv 2402.02082, lets a drafter attend to the
target's keys and values; EAGLE, arXiv 2401.15077, drafts with a layer of the target's form.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import mlx.core as mx

from redrafter_mlx.speculation.accept import Acceptance


class TargetRows(NamedTuple):
    """What layers of the target keep of the text in front of the root.

    Shapes:
      layers:  for each layer its keys and values [B, K, T, head size]
      visible: [B, T] bool, which rows belong to the text
    """

    layers: tuple[tuple[mx.array, mx.array], ...]
    visible: mx.array


class LookBack(Protocol):
    """The borrowed layers, applied behind some text."""

    def __call__(self, x: mx.array, level: int) -> mx.array:
        """Inputs of the first layer [..., D] to outputs of the last, `level` >= 1 behind the text.

        Level 1 stands where the root does, level 2 one token further on.
        """
        ...


@dataclass(frozen=True)
class BorrowedLayers:
    """Some of the target's layers, run one after the other on rows that they kept before.

    What they are given adds no row: a guess attends to the text, not to itself or other guesses.

    indices: which layers of the target they are, counted from 0
    """

    indices: tuple[int, ...]
    layers: tuple[Callable[..., mx.array], ...]
    dtype: mx.Dtype

    def __call__(
        self,
        x: mx.array,
        rows: Sequence[tuple[mx.array, mx.array]],
        offset: mx.array,
        mask: mx.array,
    ) -> mx.array:
        """Outputs of the last layer.

        Shapes:
          x:      [B, N, D], inputs of the first layer
          rows:   keys and values [B, K, T, head size] of each layer
          offset: [B] rotary position of the first of N consecutive nodes, or [B, N] of each
          mask:   [B, 1, N or 1, T] bool, True = may attend
        """
        out = x.astype(self.dtype)
        for layer, (keys, values) in zip(self.layers, rows, strict=True):
            out = layer(out, mask, cache=_KeptRows(offset, keys, values))
        return out.astype(x.dtype)

    def behind(self, rows: TargetRows, position: mx.array) -> LookBack:
        """For the beams [B, W, D] behind a root at `position` [B]."""
        mask = rows.visible[:, None, None]

        def look_back(x: mx.array, level: int) -> mx.array:
            where = position + (level - 1)
            offset = mx.broadcast_to(where[:, None], x.shape[:2]) if x.shape[1] > 1 else where
            return self(x, rows.layers, offset, mask)

        return look_back


@dataclass(frozen=True)
class _KeptRows:
    """Stands for an mlx-lm cache that takes no new rows."""

    offset: mx.array
    keys: mx.array
    values: mx.array

    def update_and_fetch(self, _keys: mx.array, _values: mx.array) -> tuple[mx.array, mx.array]:
        """The rows that were kept; those of the call are never computed."""
        return self.keys, self.values


def rows_of_text(
    length: mx.array, nodes: int, accepted: Acceptance | None, extent: int
) -> mx.array:
    """Which rows belong to the text once some of a tree behind `length` rows was accepted.

    With two committed rows, a tree of three nodes and path 0-2: 1 1 1 0 1 0.

    Shapes:
      length: [B] int32, committed before the tree
    Returns:
      [B, extent] bool
    """
    column = mx.arange(extent)[None] - length[:, None]
    if accepted is None:
        return column < 0
    path = accepted.path
    kept = (mx.arange(path.shape[1])[None] <= accepted.n_accepted[:, None])[:, :, None]  # [B, L, 1]
    on_path = mx.any((path[:, :, None] == mx.arange(nodes)) & kept, axis=1)  # [B, N]
    inside = (column >= 0) & (column < nodes)
    in_tree = mx.take_along_axis(on_path, mx.clip(column, 0, nodes - 1), axis=1)
    return (column < 0) | (inside & in_tree)
