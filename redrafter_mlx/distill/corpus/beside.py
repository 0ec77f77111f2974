"""Files that lie beside a shard of the corpus: one array, of which each text has its part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.corpus.hidden_states import to_host
from redrafter_mlx.distill.corpus.shards import damaged, load_arrays
from redrafter_mlx.runtime.atomic_write import whole_file


def save_beside(
    parts: Sequence[np.ndarray], path: Path, name: str, form: str, dtype: mx.Dtype | None = None
) -> None:
    """Write the texts' parts end to end, whole or not at all.

    name: of the array in the file
    form: name and version of the format, which is compared when the file is read
    dtype: of the numbers in the file; None is that of the arrays
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    together = np.concatenate(parts) if parts else np.zeros((0, 1))
    with whole_file(path) as partial:
        mx.save_safetensors(str(partial), {name: mx.array(together, dtype)}, {"format": form})


def load_beside(
    path: Path, name: str, form: str, counts: Sequence[int], what: str
) -> list[np.ndarray]:
    """The part of each text, `counts` rows of it; `what` says in an error what a row is.

    Raises DamagedFileError, naming the file, for what is not whole or belongs to other texts.
    """
    try:
        arrays, metadata = load_arrays(path)
        if metadata.get("format") != form:
            raise ValueError(f"its format is {metadata.get('format')!r}, not {form!r}")
        together = to_host(arrays[name])
        if sum(counts) != len(together):
            raise ValueError(
                f"it holds {len(together)} {what}, its shard's texts have {sum(counts)}"
            )
        ends = np.cumsum(counts).tolist()
        return [together[end - count : end] for count, end in zip(counts, ends, strict=True)]
    except (RuntimeError, ValueError, KeyError) as error:
        raise damaged(path, error) from None
