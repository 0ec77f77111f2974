"""A flipped bit in a file that a run resumes from is found, whichever bit it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from redrafter_mlx.distill.corpus.examples import count_tokens
from redrafter_mlx.distill.corpus.extras import Extras, save_states
from redrafter_mlx.distill.corpus.shards import (
    Shard,
    Text,
    load_shard,
    outline_shard,
    save_shard,
    summarise_shard,
)
from redrafter_mlx.distill.hours import Deadline
from redrafter_mlx.distill.training.checkpoint import (
    Checkpoint,
    Progress,
    read_checkpoint,
    save_checkpoint,
)
from redrafter_mlx.errors import DamagedFileError

FLIPS = 150


def text(seed: int) -> Text:
    rng = np.random.default_rng(seed)
    answer, states = rng.integers(0, 9, 7, np.int32), rng.normal(size=(7, 4)).astype(np.float32)
    return Text([1, 2, 3], answer, states, layer_inputs=states)


def checkpoint(folder: Path) -> tuple[Path, Callable[[], object]]:
    weights = {"a": mx.random.normal((5, 4)), "b": {"c": mx.ones((3,), mx.bfloat16)}}
    optimizer = {"step": mx.array(3, mx.uint64), "none": mx.zeros((0,))}
    save_checkpoint(Checkpoint(weights, optimizer, {"made": 1}, Progress(3, 1, 2, 1.5)), folder)
    return folder / "checkpoint.safetensors", lambda: read_checkpoint(folder)


def shard(folder: Path) -> tuple[Path, Callable[[], object]]:
    path = folder / "block-000000.safetensors"
    save_shard(Shard([text(0), text(1)], {"too long": 2}), path, {"made": "so"}, mx.float16)
    return path, lambda: (load_shard(path), summarise_shard(path))


def states(folder: Path) -> tuple[Path, Callable[[], object]]:
    path, _ = shard(folder)
    extras = Extras((0,))
    (beside,) = extras.files(path)
    save_states([text(0).states, text(1).states], beside)
    return beside, lambda: extras.load(path)


def plan(folder: Path) -> tuple[Path, Callable[[], object]]:
    Deadline(folder, 8.0).begin_training(100_000)
    return folder / "hours.json", lambda: Deadline(folder, 8.0)


def outline(folder: Path) -> tuple[Path, Callable[[], object]]:
    path, _ = shard(folder)
    return path, lambda: [(outline_shard(path), count_tokens([path], 9).tolist())]


@pytest.mark.parametrize("write", [checkpoint, shard, states, plan, outline])
def test_a_flipped_bit_is_found_or_changes_nothing(
    write: Callable[[Path], tuple[Path, Callable[[], object]]], tmp_path: Path
) -> None:
    path, read = write(tmp_path)
    whole, want, found = path.read_bytes(), shown(read()), list[str]()
    for seed in range(FLIPS):
        changed = bytearray(whole)
        at = random.Random(seed).randrange(8 * len(whole))
        changed[at // 8] ^= 1 << at % 8
        path.write_bytes(changed)
        try:
            got = shown(read())
        except DamagedFileError as error:
            found.append(str(error))
        else:  # a space of the header, or what was not read
            assert got == want, at
    assert len(found) > FLIPS / 3
    assert all(str(path) in line and "delete it" in line for line in found)


def shown(read: object) -> str:
    with np.printoptions(threshold=10**6, floatmode="unique"):
        return repr(read)
