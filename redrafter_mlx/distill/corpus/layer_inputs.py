"""Inputs of the target's layers at each place of a corpus, for drafters that read more of them.

A file of contexts lies in a folder named for the layers, under the name of its shard:

    states  [A, layers * D]  what went into each layer where an answer token was chosen, in the
                             target's type
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.corpus.beside import load_beside, save_beside
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.corpus.teacher_forcing import states_along
from redrafter_mlx.target.model import Target

FORMAT = "redrafter-mlx contexts 1"


def contexts_path(shard: Path, layers: Sequence[int]) -> Path:
    """Where the contexts of a shard lie."""
    return shard.parent / f"states-{'-'.join(map(str, layers))}" / shard.name


def read_contexts(target: Target, texts: Sequence[Text]) -> list[np.ndarray]:
    """The inputs [A, C - D] of the target's context layers at each text's answer."""
    whole = ((text.prompt + text.answer.tolist(), len(text.prompt)) for text in texts)
    return [states[:, : -target.hidden_size] for states in states_along(target, whole)]


def with_contexts(target: Target, texts: Sequence[Text]) -> list[Text]:
    """The texts with the inputs of the target's context layers."""
    found = read_contexts(target, texts)
    return [replace(text, contexts=own) for text, own in zip(texts, found, strict=True)]


def save_contexts(
    contexts: Sequence[np.ndarray], path: Path, dtype: mx.Dtype | None = None
) -> None:
    """Write the contexts of one shard's texts, whole or not at all; `dtype` as in `save_beside`."""
    save_beside(contexts, path, "states", FORMAT, dtype)


def with_saved_contexts(texts: Sequence[Text], path: Path) -> list[Text]:
    """The same from a file; DamagedFileError, naming it, if it is not whole."""
    counts = [len(text.answer) for text in texts]
    found = load_beside(path, "states", FORMAT, counts, "places")
    return [replace(text, contexts=own) for text, own in zip(texts, found, strict=True)]
