"""MTP heads in training: their own guesses fed back, from the model's files or anew."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from decoding import run
from draft_models import GREEDY, PROMPT
from drafter_laws import training_drafts_as_decoding, two_texts
from eagle_files import written_texts
from evaluations import never_counted
from mtp_samples import (
    VOCAB,
    as_deepseeks,
    load,
    random_head,
    target_model,
    with_joined_heads,
    without_ones,
    write_head,
)
from tiny import HIDDEN, plain_tokens, random_model

from redrafter_mlx.config import BeamShape
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.distill.drafter_forms import MtpForm
from redrafter_mlx.distill.forms.form import Recipe
from redrafter_mlx.distill.forms.registry import recipe_for
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.distill.training.learner import Learner
from redrafter_mlx.drafting.files.drafter_files import parameters_of
from redrafter_mlx.errors import MismatchError
from redrafter_mlx.target_model.model import Target

T = 3
OPTIONS = TrainOptions(draft_length=T, batch=64, learning_rate=3e-3)


def recipe_of(target: Target) -> Recipe:
    return recipe_for(MtpForm(), target, "tiny", "sha256:tiny", T)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "glm4_moe_lite"])
def test_logits_in_training_are_those_of_drafting(name: str, tmp_path: Path) -> None:
    """At every depth, along the same tokens, from two texts of different length in one batch."""
    model = target_model(name)
    target = Target(model)
    drafter = load(write_head(tmp_path / "d", random_head(model)), target)
    texts, batch = two_texts(layers=0)
    student = recipe_of(target).student(drafter, target, OPTIONS)
    training_drafts_as_decoding(student.drafts(batch), drafter, texts, batch)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "glm4_moe_lite"])
def test_a_head_starts_from_the_models_files_and_learns(name: str, tmp_path: Path) -> None:
    """Whatever layout they have; what is saved is read as it was trained."""
    model = target_model(name)
    target, head = Target(model), random_head(model)
    if name == "glm4_moe_lite":
        stored = as_deepseeks(with_joined_heads(head), "model.layers.3.")
    else:
        stored = {f"mtp.{key}": array for key, array in without_ones(head).items()}
    of_model = {"model.layers.0.mlp.gate.weight": mx.zeros((4, HIDDEN))}
    folder, recipe = write_head(tmp_path / "model", {**stored, **of_model}), recipe_of(target)
    recipe.check_start(folder)
    drafter = recipe.start(folder, target, never_counted)
    for key, array in parameters_of(drafter.module).items():  # type: ignore[arg-type]
        np.testing.assert_allclose(array, head[key], atol=1e-6)

    student = recipe.student(drafter, target, OPTIONS)
    batch = student.batch(recipe.extras(()).compute(target, written_texts(target)))
    learner = Learner(student)
    losses = [learner.step([lambda: student.loss(batch)], n / 12) for n in range(12)]
    assert losses[-1] < 0.9 * losses[0]
    recipe.save(student, tmp_path / "saved")
    saved = load(tmp_path / "saved", target)
    for key, array in parameters_of(student.network).items():
        np.testing.assert_allclose(
            parameters_of(saved.rows.network)[key], array, rtol=1e-3, atol=1e-4
        )
    decoder = Decoder(target, saved, BeamShape(3, 4), GREEDY)
    assert run(decoder, PROMPT, 20)[0] == plain_tokens(model, PROMPT, 20)
    recipe.check_start(tmp_path / "saved")
    with pytest.raises(MismatchError, match="another"):
        recipe_for(MtpForm(), target, "tiny", "sha256:another", T).check_start(tmp_path / "saved")


def test_a_fresh_head_has_weights_of_its_seed_alone() -> None:
    """Its layer's too, of which mlx-lm draws some by the global seed, such as biases."""
    target = Target(random_model("qwen2", vocab_size=VOCAB))
    recipe, fresh = recipe_of(target), []
    texts = recipe.extras(()).compute(target, written_texts(target, 8))
    for seed, other in ((0, 1), (0, 2), (1, 1)):
        mx.random.seed(other)
        drafter = recipe.fresh(target, np.arange(VOCAB), texts, seed)
        fresh.append(parameters_of(drafter.module))  # type: ignore[arg-type]
    assert "layers.0.self_attn.q_proj.bias" in fresh[0]
    for key, array in fresh[0].items():
        assert array.tolist() == fresh[1][key].tolist(), key
    assert fresh[0]["fc.weight"].tolist() != fresh[2]["fc.weight"].tolist()


def test_what_is_saved_says_what_it_was_made_for(tmp_path: Path) -> None:
    """In the keys by which mlx-vlm reads a head that was split off."""
    target = Target(target_model("qwen3_5"))
    recipe = recipe_of(target)
    texts = recipe.extras(()).compute(target, written_texts(target, 8))
    drafter = recipe.fresh(target, np.arange(VOCAB), texts, 0)
    recipe.save(recipe.student(drafter, target, OPTIONS), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_mtp"
    assert config["block_size"] == T + 1
    assert config["text_config"]["hidden_size"] == HIDDEN
    assert config["target_fingerprint"] == "sha256:tiny"
    names = {"fc.weight", "norm.weight", "pre_fc_norm_hidden.weight", "layers.0.mlp.up_proj.weight"}
    assert names <= dict(mx.load(str(tmp_path / "model.safetensors"))).keys()  # type: ignore[arg-type]
