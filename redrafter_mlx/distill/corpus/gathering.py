"""Several ranks write one corpus: each writes some blocks, and rank 0 collects them in its folder.

A block depends only on its number, so the corpus is the one that a single process writes. In each
round every rank writes one block. Blocks that rank 0 has already, from an earlier run or because
the folder is shared, are neither written nor sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np

from redrafter_mlx.distributed.group import Ranks
from redrafter_mlx.runtime.atomic_write import atomic_write


def write_together(
    ranks: Ranks,
    files: Callable[[int], Sequence[Path]],
    write: Callable[[int], None],
    blocks: int | None,
    enough: Callable[[], bool],
) -> None:
    """Write blocks from the first on until rank 0 has `enough`, or there are no more.

    Args:
      files: returns all files of a block, in the folder of this rank
      write: writes a block there
      blocks: number of blocks; None is no bound
    """
    for first in itertools.count(0, ranks.size):
        if _from_rank_0(ranks, [enough() or (blocks is not None and first >= blocks)])[0]:
            return
        round_ = range(first, first + ranks.size)
        wanted = _from_rank_0(
            ranks, [(blocks is None or b < blocks) and not _all_exist(files(b)) for b in round_]
        )
        if wanted[ranks.rank]:
            write(round_[ranks.rank])
        for writer in range(1, ranks.size):
            if wanted[writer]:
                _collect(ranks, writer, files(round_[writer]))


def _all_exist(files: Sequence[Path]) -> bool:
    return all(path.exists() for path in files)


def _from_rank_0(ranks: Ranks, mine: Sequence[bool]) -> list[bool]:
    """Return rank 0's values on all ranks."""
    given = mx.array([*mine]) if ranks.leads else mx.zeros((len(mine),), mx.bool_)
    return cast("list[bool]", ranks.broadcast(given.astype(mx.int32)).astype(mx.bool_).tolist())


def _collect(ranks: Ranks, writer: int, files: Sequence[Path]) -> None:
    """Copy one block's files from the rank that wrote them to rank 0."""
    mine = ranks.rank == writer
    data = [path.read_bytes() if mine else b"" for path in files]
    sizes = ranks.broadcast(mx.array([len(each) for each in data], mx.int32))
    for path, each, size in zip(files, data, cast("list[int]", sizes.tolist()), strict=True):
        words = mx.zeros((-(-size // 4),), mx.int32)
        if mine:
            words = mx.array(np.frombuffer(each.ljust(words.nbytes, b"\0"), np.int32))
        received = np.array(ranks.broadcast(words)).tobytes()[:size]
        if ranks.leads and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as partial:
                partial.write_bytes(received)
