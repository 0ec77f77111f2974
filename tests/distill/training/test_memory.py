"""Training on a corpus that is larger than the memory it may use."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from redrafter_mlx.distill.corpus.examples import Examples
from redrafter_mlx.distill.corpus.extras import Extras, save_states
from redrafter_mlx.distill.corpus.shards import Shard, Text, save_shard
from redrafter_mlx.distill.options import TrainOptions

LAYERS, D, TOKENS = (1, 2), 256, 50


@pytest.mark.parametrize("layers", [(), LAYERS])
def test_a_pass_holds_no_more_of_a_corpus_than_it_may(
    tmp_path: Path, layers: tuple[int, ...]
) -> None:
    rng, extras = np.random.default_rng(0), Extras(context=layers)
    paths = [tmp_path / f"block-{i:06d}.safetensors" for i in range(12)]
    for path in paths:
        texts = [Text([1], np.full(TOKENS, i, np.int32), _drawn(rng, 1)) for i in range(30)]
        save_shard(Shard(texts, {}), path, {})
        for file in extras.files(path):
            save_states([_drawn(rng, 2) for _ in texts], file)
    corpus = sum(file.stat().st_size for p in paths for file in (p, *extras.files(p)))
    memory = corpus // 2
    examples = Examples(tuple(paths), extras, TrainOptions(draft_length=3, batch=64), memory)
    tracemalloc.start()
    try:
        places = sum(len(batch.roots) for batch in examples.epoch(0))
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert places > 0.95 * len(paths) * 30 * TOKENS
    assert memory / 3 < held < 1.2 * memory


def test_shards_without_texts_are_passed_over_however_few_are_read_at_once(tmp_path: Path) -> None:
    """If all prompts of a block were asked before, its shard of prompts is empty."""
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"block-{i:06d}.safetensors" for i in range(3)]
    for path in paths:
        texts = [] if path is paths[1] else [Text([1], np.ones(TOKENS, np.int32), _drawn(rng, 1))]
        save_shard(Shard(texts, {}), path, {})
    options = TrainOptions(draft_length=3, batch=TOKENS)
    one_by_one = Examples(tuple(paths), Extras(), options, memory=1)
    assert [len(batch.roots) for batch in one_by_one.epoch(0)] == [TOKENS, TOKENS]


@pytest.mark.parametrize("memory", [1, 10**5, 10**9])
@pytest.mark.parametrize("size", [7, 32, 90, 400])
def test_a_pass_has_every_position_once_however_few_shards_are_read_at_once(
    tmp_path: Path, memory: int, size: int
) -> None:
    """Except for those that fill no batch at its end."""
    rng, paths, position = np.random.default_rng(0), [], 0
    for i in range(9):
        paths.append(tmp_path / f"block-{i:06d}.safetensors")
        texts = []
        for _ in range(rng.integers(1, 4)):
            length = int(rng.integers(1, 60))
            answer = np.arange(position, position + length, dtype=np.int32)
            texts.append(Text([1], answer, answer[:, None].astype(np.float32)))
            position += length
        save_shard(Shard(texts, {}), paths[-1], {})
    options = TrainOptions(draft_length=3, batch=size)
    examples = Examples(tuple(paths), Extras(), options, memory)
    assert examples.positions == position
    for number in range(2):
        batches = list(examples.epoch(number))
        assert len(batches) == position // size
        for batch in batches:
            assert np.array_equal(np.array(batch.states)[:size, 0], np.array(batch.roots))
            assert np.all(np.array(batch.labels - batch.roots[:, None])[batch.valid] > 0)
        roots = [root for batch in batches for root in batch.roots.tolist()]
        assert len(set(roots)) == len(roots) == position // size * size
        for skip in range(len(batches)):
            (first, *_) = examples.epoch(number, skip)
            assert np.array_equal(first.roots, batches[skip].roots)


def _drawn(rng: np.random.Generator, layers: int) -> np.ndarray:
    return rng.normal(size=(TOKENS, layers * D)).astype(np.float16)
