"""What the target's layers keep of the corpus: read once, for drafters that borrow layers.

A file of rows lies in a folder named for the layers, under the name of the shard it belongs to:

    rows  [R, layers, 2, K, head size]  keys and values of every token but a text's last, one text
                                        behind the other, in the target's type

so that the texts of a corpus serve drafters of every form, and only what differs is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from redrafter_mlx.decoding.prefix_cache import common_prefix
from redrafter_mlx.distill.beside import load_beside, save_beside
from redrafter_mlx.distill.corpus import Text
from redrafter_mlx.distill.states import not_finite, to_host
from redrafter_mlx.target.model import Target

FORMAT = "redrafter-mlx rows 1"


def rows_path(shard: Path, layers: Sequence[int]) -> Path:
    """Where the rows of a shard lie."""
    return shard.parent / f"layers-{'-'.join(map(str, layers))}" / shard.name


def read_rows(target: Target, layers: Sequence[int], texts: Sequence[Text]) -> list[np.ndarray]:
    """The keys and values [R, layers, 2, K, head size] of each text.

    What a text has in common with the one before it is not read again.
    Raises UnsupportedModelError, naming the layer, for values that are not finite.
    """
    cache = target.new_cache()
    before: list[int] = []
    found = []
    for text in texts:
        tokens = [*text.prompt, *text.answer.tolist()][:-1]
        start = common_prefix(before, tokens)
        if start < len(tokens):
            last = len(tokens) - start - 1
            target.prefill(mx.array([tokens[start:]], mx.int32), cache, start, [last])
        held = []
        for kept in (cache.layers[i] for i in layers):
            assert kept.keys is not None
            assert kept.values is not None
            both = mx.stack([kept.keys[0, :, : len(tokens)], kept.values[0, :, : len(tokens)]])
            held.append(both.transpose(2, 0, 1, 3))  # [R, 2, K, head size]
        rows = to_host(mx.stack(held, axis=1))
        for i, layer in enumerate(layers):
            if not np.isfinite(rows[:, i]).all():
                raise not_finite(target, f"keys or values of layer {layer}")
        found.append(rows)
        before = tokens
    return found


def with_rows(target: Target, layers: Sequence[int], texts: Sequence[Text]) -> list[Text]:
    """The texts with their rows of `layers`."""
    rows = read_rows(target, layers, texts)
    return [replace(text, rows=own) for text, own in zip(texts, rows, strict=True)]


def save_rows(rows: Sequence[np.ndarray], path: Path, dtype: mx.Dtype | None = None) -> None:
    """Write the rows of one shard's texts, whole or not at all; `dtype` as in `save_beside`."""
    save_beside(rows, path, "rows", FORMAT, dtype)


def with_saved_rows(texts: Sequence[Text], path: Path) -> list[Text]:
    """The same from a file; DamagedFileError, naming it, if it is not whole."""
    counts = [len(text.prompt) + len(text.answer) - 1 for text in texts]
    rows = load_beside(path, "rows", FORMAT, counts, "rows")
    return [replace(text, rows=own) for text, own in zip(texts, rows, strict=True)]
