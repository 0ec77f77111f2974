"""Hidden states of a corpus: stored in a dtype that can hold them, or refused by name."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tiny import byte_model, byte_tokenizer, random_model

from redrafter_mlx.distill.corpus.examples import lay_out
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.reader import Reader
from redrafter_mlx.distill.corpus.shards import Shard, save_shard
from redrafter_mlx.distill.corpus.writing.generation import write_answers
from redrafter_mlx.distill.corpus.writing.writer import Writer
from redrafter_mlx.distill.options import WritingOptions
from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.target_model.model import Target

LAYERS = (1,)
BEYOND_FLOAT16 = 1e6


def loud(model: nn.Module, dtype: mx.Dtype) -> Target:
    """Return a target whose second layer reads numbers far above 65,504."""
    model.model.embed_tokens.weight = model.model.embed_tokens.weight * BEYOND_FLOAT16
    model.set_dtype(dtype)
    return Target(model).reading(LAYERS)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_states_beyond_float16_are_trained_on_as_the_target_made_them(
    dtype: mx.Dtype, tmp_path: Path
) -> None:
    target = loud(random_model(tie_word_embeddings=False), dtype)
    written = write_answers(target, [[5, 6, 7]], [], 9)[0]
    text, shard = written.text(target), tmp_path / "block-000000.safetensors"
    kept = Extras(context=LAYERS)
    kept.add(target, byte_tokenizer(), shard, 0, [text])
    save_shard(Shard([text], {}), shard, {}, target.dtype)
    learnt = lay_out(kept.load(shard), 2).states

    whole = mx.array([written.prompt + text.answer.tolist()[:-1]])
    states = target.hidden(whole, [None] * target.n_layers)[0, 2:].astype(mx.float32)
    want = np.array(states)
    assert np.abs(want[:, : target.hidden_size]).max() > 65_504
    scale = np.abs(want).max(axis=0)
    near = 1e-5 if dtype == mx.float32 else 0.05  # calls of several rows round differently
    assert (np.abs(learnt - want) <= near * scale).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_a_corpus_takes_the_bytes_of_the_targets_own_type(dtype: mx.Dtype, tmp_path: Path) -> None:
    model = random_model()
    model.set_dtype(dtype)
    target = Target(model)
    text = write_answers(target, [[5, 6, 7]], [], 9)[0].text(target)
    path = tmp_path / "block-000000.safetensors"
    save_shard(Shard([text], {}), path, {}, target.dtype)
    arrays = mx.load(str(path))
    assert isinstance(arrays, dict)
    assert arrays["states"].dtype == dtype


def written(target: Target) -> object:
    return Writer(
        target, byte_tokenizer(), [Conversation(("hello there",))],
        WritingOptions(own_share=0.0, batch=3, max_answer_tokens=20),
    ).write(0)  # fmt: skip


def read(target: Target) -> object:
    given = Conversation(("hello there",), ("a fine and long answer",))
    return Reader(target, byte_tokenizer(), [given], "data", 3).write(0)


@pytest.mark.parametrize("use", [written, read])
def test_states_that_are_not_finite_stop_a_run_and_name_the_layer(use) -> None:  # type: ignore[no-untyped-def]
    target = loud(byte_model(), mx.float16)
    with pytest.raises(UnsupportedModelError, match=r"layer 1.*float16.*--dtype bfloat16"):
        use(target)
