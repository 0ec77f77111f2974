"""Shards, corpora and their keys."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from tiny import byte_tokenizer
from writing_samples import THINKS, options

from redrafter_mlx.distill.corpus.filters import NOTHING
from redrafter_mlx.distill.corpus.folder import CorpusGoal, CorpusSize
from redrafter_mlx.distill.corpus.prompts.given_texts import Given, corpus_key
from redrafter_mlx.distill.corpus.shards import Shard, Text, load_shard, save_shard, summarise_shard
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.options import Labels, TrainOptions
from redrafter_mlx.errors import BadInputError, DamagedFileError


def test_a_shard_comes_back_as_it_was_written(tmp_path) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(0)
    texts = [
        Text([1, 2, 3], np.array([4, 5], np.int32), rng.normal(size=(2, 4)).astype(np.float16)),
        Text([9], np.array([7], np.int32), rng.normal(size=(1, 4)).astype(np.float16)),
    ]
    path = tmp_path / "block-000000.safetensors"
    save_shard(Shard(texts, {"answer too short": 2}), path, {"seed": "0"})
    back = load_shard(path)
    assert [t.prompt for t in back.texts] == [[1, 2, 3], [9]]
    for mine, theirs in zip(texts, back.texts, strict=True):
        assert np.array_equal(mine.answer, theirs.answer)
        assert np.array_equal(mine.states, theirs.states)
    summary = summarise_shard(path)
    assert (summary.answer_tokens, summary.texts, summary.left_out) == (3, 2, back.left_out)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_shard_cut_short_is_refused_by_name(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "block-000000.safetensors"
    text = Text([1], np.array([4], np.int32), np.zeros((1, 4), np.float16))
    save_shard(Shard([text], {}), path, {})
    path.write_bytes(path.read_bytes()[:-3])
    for read in (load_shard, summarise_shard):
        with pytest.raises(DamagedFileError, match="block-000000"):
            read(path)


def test_a_corpus_whose_blocks_stay_empty_is_given_up() -> None:
    goal = CorpusGoal(1000, 10**9, min_blocks=2, max_empty=5)
    left = {"prompt too long": 12}
    assert not goal.reached(CorpusSize(4, 0, 0, 0, 0, 100, left))
    with pytest.raises(BadInputError, match="12 prompt too long"):
        goal.reached(CorpusSize(5, 0, 0, 0, 0, 100, left))
    assert not goal.reached(CorpusSize(50, 1, 10, 0, 1, 100, left))


def test_a_corpus_has_a_block_to_train_on_and_one_to_hold_out() -> None:
    goal = CorpusGoal(1000, 10**9, min_blocks=2)
    assert not goal.reached(CorpusSize(2, 1, 5000, 0, 9, 100, {"text too long": 32}))
    assert goal.reached(CorpusSize(3, 2, 5000, 0, 9, 100, {"text too long": 32}))


def test_a_corpus_has_another_key_only_if_its_target_is_told_otherwise() -> None:
    plain, thinks = byte_tokenizer(), byte_tokenizer()
    thinks.chat_template += THINKS
    keys = {
        (name, thinking): corpus_key(
            "target",
            "float32",
            TrainingJob("any", Path("out"), writing=options(thinking=thinking)),
            Given((), (), NOTHING, 0),
            tokenizer,
        )
        for name, tokenizer in (("plain", plain), ("thinks", thinks))
        for thinking in (False, True)
    }
    assert keys["plain", False] == keys["plain", True] == keys["thinks", False]
    assert keys["thinks", False] != keys["thinks", True]


def test_the_length_of_drafts_is_in_the_key_of_a_corpus_only_where_it_is_read() -> None:
    keys = {
        (labels, length): corpus_key(
            "target",
            "float32",
            TrainingJob(
                "any", Path("out"), data=Path("data"), labels=labels,
                training=TrainOptions(draft_length=length, soft_share=0.0),
            ),
            Given((), (), NOTHING, 0),
            byte_tokenizer(),
        )
        for labels in get_args(Labels)
        for length in (3, 5)
    }  # fmt: skip
    assert keys["data", 3] == keys["data", 5]
    assert len(set(keys.values())) == 3
