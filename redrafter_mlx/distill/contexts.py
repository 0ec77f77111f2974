"""Inputs of the target's layers at each place of a corpus, for drafters that read more of them.

A file of contexts lies in a folder named for the layers, under the name of its shard:

    states  [A, layers * D]  float16  what went into each layer where an answer token was chosen
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.along import states_along
from redrafter_mlx.distill.corpus import Text, damaged, load_arrays
from redrafter_mlx.target import Target
from redrafter_mlx.whole import whole_file

FORMAT = "redrafter-mlx contexts 1"


def contexts_path(shard: Path, layers: Sequence[int]) -> Path:
    """Where the contexts of a shard lie."""
    return shard.parent / f"states-{'-'.join(map(str, layers))}" / shard.name


def read_contexts(target: Target, texts: Sequence[Text]) -> list[np.ndarray]:
    """The inputs [A, C - D] float16 of the target's context layers at each text's answer."""
    whole = ((text.prompt + text.answer.tolist(), len(text.prompt)) for text in texts)
    return [states[:, : -target.hidden_size] for states in states_along(target, whole)]


def with_contexts(target: Target, texts: Sequence[Text]) -> list[Text]:
    """The texts with the inputs of the target's context layers."""
    found = read_contexts(target, texts)
    return [replace(text, contexts=own) for text, own in zip(texts, found, strict=True)]


def save_contexts(contexts: Sequence[np.ndarray], path: Path) -> None:
    """Write the contexts of one shard's texts, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    together = np.concatenate(contexts) if contexts else np.zeros((0, 1), np.float16)
    with whole_file(path) as partial:
        mx.save_safetensors(str(partial), {"states": mx.array(together)}, {"format": FORMAT})


def with_saved_contexts(texts: Sequence[Text], path: Path) -> list[Text]:
    """The same from a file; DamagedFileError, naming it, if it is not whole."""
    try:
        arrays, metadata = load_arrays(path)
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
        states = np.array(arrays["states"])
        counts = [len(text.answer) for text in texts]
        if sum(counts) != len(states):
            raise ValueError(f"it holds {len(states)} places, its shard's texts have {sum(counts)}")
        ends = np.cumsum(counts).tolist()
        return [
            replace(text, contexts=states[end - count : end])
            for text, count, end in zip(texts, counts, ends, strict=True)
        ]
    except (RuntimeError, ValueError, KeyError) as error:
        raise damaged(path, error) from None
