"""EAGLE drafters that are written, loaded and trained in tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from draft_models import PROMPT
from eagle_samples import VOCAB, Sample, Tensors
from tiny import HIDDEN, byte_tokenizer, plain_tokens

from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.corpus.writing.generation import write_answers
from redrafter_mlx.distill.drafter_forms import EagleForm
from redrafter_mlx.distill.forms.eagle import EagleStudent
from redrafter_mlx.distill.forms.form import Recipe
from redrafter_mlx.distill.forms.registry import recipe_for
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.interface import Drafter, Seen
from redrafter_mlx.drafting.published.heads.eagle import EagleDrafter
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.model import Target

TRAINED = {
    "EAGLE-3": Sample(config={"rms_norm_eps": 1e-5}, prefix="midlayer."),
    "EAGLE": Sample(form=1, features=1, config={"rms_norm_eps": 1e-5}, own_head=False),
}


def train(drafter: EagleDrafter, model: nn.Module) -> Tensors:
    """Return the drafter's tensors after it has learned some answers of the target.

    Its input tokens are random, so that it learns from the target's features.
    """
    starts = [PROMPT, PROMPT[::-1], sorted(PROMPT)]
    texts = mx.array([start + plain_tokens(model, start, 50) for start in starts])
    features = features_of(drafter, model, texts)
    P = texts.shape[1] - 2
    zeros = mx.zeros((len(starts),), mx.int32)
    network, rows = drafter.rows.network, drafter.rows  # rows: the network at tree positions
    row = Seen(texts[:, : P + 1], features[:, :P], zeros, zeros + P, P, 0)

    def loss(tokens: mx.array) -> mx.array:
        cache = TreeCache(drafter.config.n_layers)
        cache.plan_prompt(0, P)
        hidden = rows.run((tokens, rows.context(row)), cache.layers)
        return nn.losses.cross_entropy(rows.logits(hidden), texts[:, 2:], reduction="mean")

    optimizer, rng = optim.Adam(3e-3), np.random.default_rng(0)
    value_and_grad = nn.value_and_grad(network, loss)
    for _ in range(50):
        other = mx.array(rng.integers(0, VOCAB, (len(starts), P)))
        _, grads = value_and_grad(other)
        optimizer.update(network, grads)
        mx.eval(network.parameters())
    leaves = nn.utils.tree_flatten(network.parameters())
    return {name: np.array(array).astype(np.float64) for name, array in leaves}


def features_of(drafter: Drafter, model: nn.Module, texts: mx.array) -> mx.array:
    """Return the features [B, P, C] of texts [B, P] that a drafter reads, from mlx-lm's layers."""
    x = model.model.embed_tokens(texts)
    inputs = []
    for layer in model.model.layers:
        inputs.append(x)
        x = layer(x, mask="causal")
    inputs.append(x)
    read = [inputs[i] for i in drafter.features.layers]
    return mx.concatenate([*read, model.model.norm(x)], axis=-1)


def load(folder: Path, target: Target) -> EagleDrafter:
    drafter = DrafterFolder(folder).bind(target, byte_tokenizer())
    assert isinstance(drafter, EagleDrafter)
    return drafter


def seen(tokens: Sequence[int], features: np.ndarray, at: int, count: int, rows: int) -> Seen:
    """Return `count` positions from `at` on, padded to `rows`."""
    padded = [*tokens[at : at + count + 1], *[0] * (rows - count)]
    read = np.concatenate(
        [features[at : at + count], np.full((rows - count, features.shape[1]), 9)]
    )
    return Seen(
        mx.array([padded], mx.int32), mx.array(read[None], mx.float32), mx.array([at]),
        mx.array([count]), at + rows,
    )  # fmt: skip


def changed_config(folder: Path, to: Path, **changes: object) -> Path:
    """Copy the folder with these keys changed."""
    copied = Path(shutil.copytree(folder, to / "changed"))
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | changes))
    return copied


def written_texts(target: Target, answer: int = 40) -> list[Text]:
    """Return greedy answers in the form of a corpus."""
    prompts = [[3, 5, 7, 11, 4], [9, 8, 7], [3, 5, 7, 11, 4, 2, 2, 6]]
    written = write_answers(target, prompts, [], answer, stop_at_loops=False)
    return [one.text(target) for one in written]


def recipe_of(target: Target, **changes: object) -> Recipe:
    form = EagleForm(**{"draft_vocab": 60, "context_layers": (0, 2)} | changes)  # type: ignore[arg-type]
    return recipe_for(form, target, "tiny", "sha256:tiny", 3)


def fresh(target: Target, seed: int = 0) -> EagleStudent:
    recipe, texts = recipe_of(target), written_texts(target.reading((0, 2)))
    counts = np.bincount(np.concatenate([text.answer for text in texts]), minlength=VOCAB)
    target, options = target.reading((0, 2)), TrainOptions(draft_length=3, batch=64, seed=seed)
    student = recipe.student(recipe.fresh(target, counts, texts, seed), target, options)
    assert isinstance(student, EagleStudent)
    return student


def save(student: EagleStudent, folder: Path) -> None:
    student.recipe.save(student, folder)


def random_text(prompt: int, answer: int, layers: int, seed: int, hard: bool = True) -> Text:
    """Return a text of random tokens, with random states in place of a target's."""
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(prompt + answer - 1, (layers + 1) * HIDDEN)).astype(np.float32)
    tokens = rng.integers(0, VOCAB, prompt + answer).astype(np.int32)
    of_answer = states[prompt - 1 :]
    return Text(
        tokens[:prompt].tolist(),
        tokens[prompt:],
        of_answer[:, -HIDDEN:],
        layer_inputs=of_answer[:, :-HIDDEN] if layers else None,
        hard_labels=hard,
        prompt_states=states[: prompt - 1],
    )
