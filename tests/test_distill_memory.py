"""Learning from a corpus that is larger than the memory it may use."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from redrafter_mlx.distill.contexts import contexts_path, save_contexts
from redrafter_mlx.distill.corpus import Shard, Text, save_shard
from redrafter_mlx.distill.examples import Examples
from redrafter_mlx.distill.extras import Extras

LAYERS, D, TOKENS = (1, 2), 256, 50


@pytest.mark.parametrize("layers", [(), LAYERS])
def test_a_pass_holds_no_more_of_a_corpus_than_it_may(
    tmp_path: Path, layers: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"block-{i:06d}.safetensors" for i in range(12)]
    for path in paths:
        texts = [Text([1], np.full(TOKENS, i, np.int32), _drawn(rng, 1)) for i in range(30)]
        save_shard(Shard(texts, {}), path, {})
        if layers:
            save_contexts([_drawn(rng, 2) for _ in texts], contexts_path(path, layers))
    extras = Extras(context=layers)
    corpus = sum(file.stat().st_size for p in paths for file in (p, *extras.files(p)))
    memory = corpus // 2
    examples = Examples(tuple(paths), extras, 3, 64, memory, 0)
    tracemalloc.start()
    try:
        places = sum(len(batch.roots) for batch in examples.epoch(0))
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert places > 0.95 * len(paths) * 30 * TOKENS
    assert memory / 3 < held < 1.2 * memory


def _drawn(rng: np.random.Generator, layers: int) -> np.ndarray:
    return rng.normal(size=(TOKENS, layers * D)).astype(np.float16)
