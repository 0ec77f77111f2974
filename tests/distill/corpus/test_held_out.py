"""No held-out text is trained on; texts of either kind are drawn from all shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from train_runs import SMALL, model, own_cache, prompts  # noqa: F401

from redrafter_mlx.distill.corpus.examples import hold_out, sample_texts
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.shards import Shard, Text, load_shard, save_shard
from redrafter_mlx.distill.options_file import make_job
from redrafter_mlx.distill.plan import plan
from redrafter_mlx.distill.run import make_trainer, write
from redrafter_mlx.errors import BadInputError

TOKENS = 5


def save(folder: Path, prompts: list[list[list[int]]]) -> list[Path]:
    """Write a shard for each list of prompts, with answers of TOKENS tokens."""
    paths = []
    for block, own in enumerate(prompts):
        paths.append(folder / f"block-{block:06d}.safetensors")
        answer, states = np.arange(TOKENS, dtype=np.int32), np.zeros((TOKENS, 2), np.float16)
        save_shard(Shard([Text(prompt, answer, states) for prompt in own], {}), paths[-1], {})
    return paths


def test_texts_are_drawn_from_all_shards_and_only_their_shards_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = save(tmp_path, [[[block, i] for i in range(4)] for block in range(32)])
    loaded: list[Path] = []
    monkeypatch.setattr(
        Extras, "load", lambda _, shard: loaded.append(shard) or load_shard(shard).texts
    )
    drawn = [text.prompt for text in sample_texts(shards, 8 * TOKENS, Extras())]
    assert len(drawn) == 8
    blocks = {block for block, _ in drawn}
    assert len(blocks) > 4
    assert max(blocks) > 16
    assert sorted(loaded) == [shards[block] for block in sorted(blocks)]
    assert [text.prompt for text in sample_texts(shards, 8 * TOKENS, Extras())] == drawn


def test_a_held_out_text_whose_prompt_is_trained_on_is_not_evaluated(tmp_path: Path) -> None:
    shards = save(tmp_path, [[[1], [2, 3], [4]], [[5], [2, 3]], [[4], [2], [3]]])
    trained_on, texts = hold_out(shards, lambda block: block == 0, Extras())
    assert trained_on == shards[1:]
    assert [text.prompt for text in texts] == [[1]]


def test_texts_are_held_out_even_if_all_their_prompts_are_trained_on(tmp_path: Path) -> None:
    shards = save(tmp_path, [[[1], [2]], [[2], [1]]])
    _, texts = hold_out(shards, lambda block: block == 0, Extras())
    assert sorted(text.prompt for text in texts) == [[1], [2]]
    with pytest.raises(BadInputError, match="too small"):
        hold_out(shards, lambda _: True, Extras())


def test_if_the_held_out_blocks_are_empty_another_one_is_held_out(tmp_path: Path) -> None:
    """Rather than nothing, after hours of writing: all their texts were left out."""
    shards = save(tmp_path, [[], [], [[1], [2]], [[3]], [[4]]])
    trained_on, texts = hold_out(shards, lambda block: block == 0, Extras())
    assert trained_on == shards[3:]
    assert sorted(text.prompt for text in texts) == [[1], [2]]
    with pytest.raises(BadInputError, match="too small"):
        hold_out(shards[:3], lambda block: block == 0, Extras())


def test_accuracy_in_training_is_along_texts_of_several_blocks_that_are_trained_on(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    keys = {"model": str(model), "prompts": [str(prompts)], **SMALL[""], "answer_tokens": 1200}
    tables = {table: own for table, own in SMALL.items() if table}
    run = write(plan(make_job({**keys, **tables}, tmp_path / "out")))
    trainer = make_trainer(run)
    trained_on, _ = run.parts
    blocks = [[text.prompt for text in load_shard(shard).texts] for shard in trained_on]
    seen = [text.prompt for text in trainer.seen]
    assert all(any(prompt in own for own in blocks) for prompt in seen)
    assert sum(any(prompt in own for prompt in seen) for own in blocks) > 1
    assert [text.prompt for text in make_trainer(run).seen] == seen
