"""The start of training: a drafter's own weights, form and vocabulary, or a clear refusal."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from evaluations import logits_along, never_counted
from mlx.utils import tree_flatten
from tiny import random_drafter, random_model

from redrafter_mlx.distill.corpus.examples import lay_out
from redrafter_mlx.distill.corpus.writing.generation import write_answers
from redrafter_mlx.distill.forms.fresh_weights import scale_recurrent
from redrafter_mlx.distill.forms.recurrent import RecurrentRecipe
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.drafting.recurrent import RecurrentNetwork, save_drafter
from redrafter_mlx.drafting.recurrent_config import read_config
from redrafter_mlx.errors import DamagedFileError, MismatchError, ModelNotFoundError
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.files.names import WEIGHTS


@pytest.fixture
def given(tmp_path: Path) -> Path:
    drafter = random_drafter(seed=4, head="tied", draft_vocab_size=50, target_fingerprint="mine")
    save_drafter(drafter, tmp_path / "given", dtype=mx.float16)
    return tmp_path / "given"


@pytest.mark.parametrize("name", ["llama", "gemma", "cohere"])
def test_a_fresh_tied_drafter_is_unsure_but_not_mute(name: str) -> None:
    """Its logits have a language model's spread, independent of the target's weights."""
    target = Target(random_model(name))
    config = random_drafter(head="tied", draft_vocab_size=50).config
    answers = [w.text(target) for w in write_answers(target, [[5, 6, 7], [8, 9]], [], 12)]
    drafter = RecurrentRecipe(config).fresh(target, np.arange(target.vocab_size), answers, seed=0)
    batch = lay_out(answers, 2).batch(0, 20)
    for logits in logits_along(drafter, batch):
        assert 1.0 < mx.std(logits).item() < 4.0


def test_a_fresh_drafter_reads_the_last_state_alone_and_at_unit_size() -> None:
    target = Target(random_model()).reading((0, 1))
    config = random_drafter(head="tied", context_layers=(0, 1)).config
    answers = [w.text(target) for w in write_answers(target, [[5, 6, 7], [8, 9]], [], 12)]
    recipe = RecurrentRecipe(config)
    drafter = recipe.fresh(target, np.arange(target.vocab_size), answers, seed=0).module
    contexts = mx.array(lay_out(answers, 1).states).astype(mx.float32)
    read, last = drafter.read(contexts), contexts[:, -target.hidden_size :]
    unit = mx.sqrt(mx.mean(mx.square(last), axis=0))
    assert mx.allclose(read, last / unit, atol=1e-3)
    assert "context_scale" not in dict(tree_flatten(drafter.trainable_parameters()))


def test_a_coordinate_that_is_never_used_leaves_weights_that_can_be_stored() -> None:
    config = random_drafter(head="tied", context_layers=(0, 1)).config
    network = RecurrentNetwork.fresh(config, 0)
    dead = mx.zeros((3 * config.hidden_size,))
    scale_recurrent(network, dead, 1.0, 1.0)
    for name, array in tree_flatten(network.parameters()):
        assert mx.all(mx.isfinite(array.astype(mx.float16))), name


def test_all_of_a_fresh_drafters_weights_are_drawn_as_wide_as_pytorchs() -> None:
    one, other = (
        dict(tree_flatten(RecurrentNetwork.fresh(random_drafter().config, seed).parameters()))
        for seed in (7, 8)
    )
    assert not any(mx.array_equal(one[name], other[name]) for name in one)
    for name, array in one.items():
        bound = one[name.replace("bias", "weight")].shape[1] ** -0.5
        assert 0.8 * bound < mx.max(mx.abs(array)).item() <= bound


def test_a_trained_drafter_starts_with_its_weights(given: Path) -> None:
    recipe = RecurrentRecipe(read_config(given))
    target = Target(random_model())
    started = recipe.start(given, target, never_counted)
    drafter = recipe.student(started, target, TrainOptions()).network
    stored = mx.load(str(given / WEIGHTS))
    mine = dict(tree_flatten(drafter.parameters()))
    assert set(mine) == set(stored)
    for name, array in mine.items():
        assert mx.array_equal(array, stored[name].astype(array.dtype)), name
        assert array.dtype == (mx.int32 if name == "draft_vocab" else mx.float32)
    assert "draft_vocab" not in dict(tree_flatten(drafter.trainable_parameters()))


def test_the_shape_it_is_used_with_and_its_targets_name_may_differ(given: Path) -> None:
    wanted = replace(read_config(given), draft_length=2, target="elsewhere")
    RecurrentRecipe(wanted).check_start(given)


@pytest.mark.parametrize(
    ("key", "value"),
    [("rnn", False), ("num_draft_layers", 3), ("context_layers", (1,)), ("head", "own")],
)
def test_another_form_is_refused_by_name(given: Path, key: str, value: object) -> None:
    wanted = replace(read_config(given), **{key: value})  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match=f"has {key} "):
        RecurrentRecipe(wanted).check_start(given)


@pytest.mark.parametrize("size", [5, None])
def test_a_tied_head_may_start_with_another_draft_vocabulary(given: Path, size: int | None) -> None:
    """The most frequent tokens of the corpus, or all; what it knows of tokens stays the same."""
    config, target = read_config(given), Target(random_model())
    recipe = RecurrentRecipe(replace(config, draft_vocab_size=size))
    recipe.check_start(given)
    started = recipe.start(given, target, lambda: np.arange(target.vocab_size))
    assert started.vocabulary.size == (size or target.vocab_size)
    before = RecurrentRecipe(config).start(given, target, never_counted)
    if size is not None:
        assert started.module.draft_vocab.tolist() == [*range(target.vocab_size)][-size:]
    else:
        features = mx.random.normal((1, 1, target.hidden_size), key=mx.random.key(0))
        both = [d.logits(features, features) for d in (started, before)]
        assert mx.array_equal(both[0][..., before.module.draft_vocab], both[1])


def test_a_head_of_its_own_may_not(tmp_path: Path) -> None:
    drafter = random_drafter(head="own", draft_vocab_size=50, target_fingerprint="mine")
    save_drafter(drafter, tmp_path, dtype=mx.float16)
    wanted = replace(read_config(tmp_path), draft_vocab_size=60)
    with pytest.raises(MismatchError, match="has draft_vocab_size "):
        RecurrentRecipe(wanted).check_start(tmp_path)


def test_another_target_is_refused_before_anything_is_written(given: Path) -> None:
    wanted = replace(read_config(given), target_fingerprint="another")
    with pytest.raises(MismatchError, match="was trained for"):
        RecurrentRecipe(wanted).check_start(given)


def test_a_folder_without_a_drafter_is_refused(given: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no drafter at"):
        RecurrentRecipe(read_config(given)).check_start(tmp_path / "nothing")
    (given / WEIGHTS).unlink()
    with pytest.raises(DamagedFileError, match="is missing"):
        RecurrentRecipe(read_config(given)).check_start(given)


def test_training_starts_from_weights_under_any_name_and_knows_them_again(given: Path) -> None:
    """`export` writes other names, and published drafters have them."""
    recipe = RecurrentRecipe(read_config(given))
    digest = recipe.check_start(given)
    assert digest == hashlib.sha256((given / WEIGHTS).read_bytes()).hexdigest()
    (given / WEIGHTS).rename(given / "drafter.safetensors")
    assert recipe.check_start(given) == digest
    target = Target(random_model())
    assert recipe.start(given, target, never_counted).vocabulary.size == 50
