"""DSpark in training: blocks along whole texts, and the labels in place of the drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from decoding import run
from draft_models import GREEDY
from drafter_laws import training_drafts_as_decoding, two_texts
from eagle_files import seen, written_texts
from mlx.utils import tree_map
from tiny import HIDDEN, byte_model, byte_tokenizer, plain_tokens

from redrafter_mlx.config import BeamShape
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.distill.drafter_forms import DSparkForm
from redrafter_mlx.distill.forms.dspark import DSparkRecipe, DSparkStudent
from redrafter_mlx.distill.forms.registry import recipe_for
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.drafting.files.drafter_files import open_files
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.published.blocks.config import Sight
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.target_model.model import Target

T = 3
OPTIONS = TrainOptions(draft_length=T, batch=64)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return byte_model(num_hidden_layers=4, tie_word_embeddings=False)


def random_student(target: Target, *sights: Sight, **form: object) -> DSparkStudent:
    """Return a drafter with random weights, so that all of its parts matter."""
    given = {"draft_vocab": 60, "context_layers": (0, 2), "rank": 8, "layers": 2, **form}
    recipe = recipe_for(DSparkForm(**given), target, "tiny", "sha256:tiny", T)  # type: ignore[arg-type]
    assert isinstance(recipe, DSparkRecipe)
    if sights:
        recipe = replace(recipe, config=replace(recipe.config, sights=sights))
    network = recipe.network()
    mx.random.seed(1)
    network.update(tree_map(lambda a: a + 0.3 * mx.random.normal(a.shape), network.parameters()))
    return recipe.student(recipe.bind(network, target), target, OPTIONS)


@pytest.mark.parametrize(
    "sights",
    [(), (Sight(causal=True, window=4096),) * 2, (Sight(causal=False, window=4),) * 2],
    ids=["bidirectional", "causal", "windows"],
)
def test_logits_in_training_are_those_of_drafting(
    sights: tuple[Sight, ...], model: nn.Module
) -> None:
    """At every depth, along the same tokens, from two texts of different length in one batch."""
    student = random_student(Target(model), *sights)
    texts, batch = two_texts(layers=2)
    drafts = student.drafts(batch)
    training_drafts_as_decoding(drafts, student.drafter, texts, batch, unread=HIDDEN)


@pytest.mark.parametrize("vocab", [60, "all"])
def test_what_is_saved_drafts_as_it_was_trained(
    vocab: object, model: nn.Module, tmp_path: Path
) -> None:
    target = Target(model)
    student = random_student(target, draft_vocab=vocab)
    student.recipe.save(student, tmp_path)
    drafter = DrafterFolder(tmp_path).bind(target, byte_tokenizer())
    assert drafter.max_length == T + 1
    tokens, features = [*range(9)], np.random.default_rng(0).normal(size=(8, 3 * HIDDEN))
    files = open_files(tmp_path)
    again = DSparkRecipe.of_files(files, target, "tiny", "sha256:tiny")
    assert (again.record, again.drafts) == (student.recipe.record, T)
    trees = []
    for each in (drafter, student.drafter):
        read = seen(tokens, features, 0, 8, 8)
        trees.append(each.draft(each.empty(1), read, BeamShape(3, T + 1))[0])
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
    np.testing.assert_allclose(trees[0].log_probs, trees[1].log_probs, atol=0.05)
    decoder = Decoder(target.reading(drafter.features.layers), drafter, BeamShape(3, 4), GREEDY)
    assert run(decoder, [3, 5, 7], 20)[0] == plain_tokens(model, [3, 5, 7], 20)


def test_a_fresh_drafter_corrects_nothing_and_reads_coordinates_of_one_size(
    model: nn.Module,
) -> None:
    target = Target(model)
    recipe = recipe_for(DSparkForm(context_layers=(0, 2)), target, "tiny", "sha256:tiny", T)
    texts = recipe.extras(()).compute(target, written_texts(target, 12))
    network = recipe.fresh(target, np.arange(258), texts, 0).module
    assert not mx.any(network.markov_head.markov_w2.weight).item()  # type: ignore[union-attr]
    states = np.concatenate([text.whole_states for text in texts])[:, HIDDEN : 2 * HIDDEN]
    unit = states / np.sqrt((states**2).mean(axis=1, keepdims=True))
    padded = mx.array(np.pad(unit, ((0, 0), (HIDDEN, 0))), mx.float32)
    read = np.array(network.fc(padded))  # type: ignore[union-attr]
    np.testing.assert_allclose(np.sqrt((read**2).mean(axis=0)), 1, rtol=1e-3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"context_layers": ()}, "context_layers"),
        ({"context_layers": (4, 2)}, "rising order"),
        ({"layers": 0}, "layers"),
        ({"rank": 0}, "rank"),
    ],
)
def test_a_form_that_no_drafter_can_have_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        DSparkForm(**given)  # type: ignore[arg-type]
