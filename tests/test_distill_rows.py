"""What borrowed layers keep of a corpus: as the target keeps it, and looked at as in decoding."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tiny import HIDDEN, random_drafter, random_model

from redrafter_mlx.distill import examples
from redrafter_mlx.distill.corpus import Shard, Text, save_shard
from redrafter_mlx.distill.examples import places
from redrafter_mlx.distill.extras import Extras
from redrafter_mlx.distill.learner import prepare_borrowed
from redrafter_mlx.distill.loss import behind_texts, draft_logits
from redrafter_mlx.distill.rows import read_rows, rows_path, save_rows, with_rows
from redrafter_mlx.distill.writing import write_answers
from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.target.borrow import TargetRows
from redrafter_mlx.target.model import Target

LAYERS = (0, 1)


def texts(target: Target) -> list[Text]:
    """Two that begin alike, one that another begins with, and one of its own."""
    prompts = [[5, 6, 7, 8], [5, 6, 7, 9, 3], [5, 6], [40, 41, 42]]
    return [Text(w.prompt, w.answer, w.states) for w in write_answers(target, prompts, [], 11)]


def test_rows_are_those_of_each_text_read_alone() -> None:
    target = Target(random_model("qwen3"))
    said = texts(target)
    for text, rows in zip(said, read_rows(target, LAYERS, said), strict=True):
        tokens = [*text.prompt, *text.answer.tolist()][:-1]
        cache = target.new_cache()
        target.prefill(mx.array([tokens]), cache, 0, [0])
        assert len(rows) == len(tokens)
        for place, layer in enumerate(LAYERS):
            for which, want in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
                assert want is not None
                got = mx.array(rows[:, place, which]).swapaxes(0, 1)  # [K, R, head size]
                assert mx.allclose(got, want[0, :, : len(tokens)], atol=5e-3)


@pytest.mark.parametrize("run", [4, 32])
def test_every_place_of_a_batch_looks_back_over_its_own_text(
    run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "_RUN", run)
    target = Target(random_model())
    bound = random_drafter(head="tied", borrowed_layers=LAYERS).bind(target)
    said = with_rows(target, LAYERS, texts(target))
    laid = places(said, 3)
    start, size = 4, 30  # begins and ends inside a text
    together = draft_logits(bound, laid.batch(start, size))
    assert bound.borrowed is not None
    for i in range(size):
        at = start + i
        text, position = said[laid.text[at]], int(laid.root_at[at])
        tokens = [*text.prompt, *text.answer.tolist()]
        assert tokens[position] == laid.roots[at]
        assert text.rows is not None
        kept = mx.array(text.rows).astype(mx.float32).transpose(1, 2, 3, 0, 4)[:, :, None]
        visible = mx.arange(kept.shape[4])[None] < position
        rows = TargetRows(tuple((kept[k, 0], kept[k, 1]) for k in range(len(LAYERS))), visible)
        alone = bound.behind(bound.borrowed.behind(rows, mx.array([position])))
        context = mx.array(laid.states[at]).astype(mx.float32)[None, None]
        state = mx.zeros((1, 1, HIDDEN))
        fed = [int(laid.roots[at]), *laid.labels[at].tolist()]
        for depth in range(3):
            state = alone.advance(state, mx.array([[fed[depth]]]))
            want = alone.logits(context, state, depth + 1)[0, 0]
            np.testing.assert_allclose(together[depth][i], want, atol=2e-3)


def test_several_guesses_at_a_place_are_looked_up_as_each_alone() -> None:
    target = Target(random_model())
    bound = random_drafter(head="tied", borrowed_layers=LAYERS).bind(target)
    laid = places(with_rows(target, LAYERS, texts(target)), 3)
    look_back = behind_texts(bound, laid.batch(2, 20)).look_back
    assert look_back is not None
    x = mx.random.normal((20, 3, HIDDEN), key=mx.random.key(0))
    together = look_back(x, 2)
    for w in range(3):
        assert mx.allclose(together[:, w], look_back(x[:, w], 2), atol=1e-4)


def test_texts_load_with_the_rows_that_were_saved(tmp_path: Path) -> None:
    target = Target(random_model())
    said = with_rows(target, LAYERS, texts(target))
    shard = tmp_path / "block-000000.safetensors"
    save_shard(Shard(said, {}), shard, {})
    save_rows([t.rows for t in said if t.rows is not None], rows_path(shard, LAYERS))

    loaded = Extras(borrowed=LAYERS).load(shard)

    for text, want in zip(loaded, said, strict=True):
        assert text.answer.tolist() == want.answer.tolist()
        assert np.array_equal(text.rows, want.rows)  # type: ignore[arg-type]
    assert all(text.rows is None for text in Extras().load(shard))


def test_rows_that_are_missing_or_of_other_texts_are_named(tmp_path: Path) -> None:
    target = Target(random_model())
    said = with_rows(target, LAYERS, texts(target))
    shard = tmp_path / "block-000000.safetensors"
    save_shard(Shard(said, {}), shard, {})
    path = rows_path(shard, LAYERS)
    extras = Extras(borrowed=LAYERS)
    with pytest.raises(DamagedFileError, match="layers-0-1"):
        extras.load(shard)
    save_rows([t.rows for t in said[1:] if t.rows is not None], path)
    with pytest.raises(DamagedFileError, match="layers-0-1"):
        extras.load(shard)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DamagedFileError, match="layers-0-1"):
        extras.load(shard)


def test_a_fresh_drafters_guesses_have_the_size_of_the_layers_inputs() -> None:
    target = Target(random_model())
    drafter = random_drafter(head="tied", borrowed_layers=(1,))
    prepare_borrowed(drafter, target, [3, 1, 4, 1, 5, 9, 2])
    inputs = target.layer_input(mx.array([[3, 1, 4, 1, 5, 9, 2]]), 1)[0]
    sizes = sorted(mx.sqrt(mx.mean(inputs * inputs, axis=-1)).tolist())
    assert drafter.config.borrowed_scale == pytest.approx(sizes[3], rel=1e-5)
