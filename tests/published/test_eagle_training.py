"""EAGLE in training: whole texts, and the drafter's own guesses fed back as in drafting."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from decoding import run
from drafter_laws import training_drafts_as_decoding, two_texts
from eagle_files import fresh, load, random_text, recipe_of, save, seen, written_texts
from eagle_samples import SAMPLES, VOCAB, Reference, Sample, random_tensors, write_files
from evaluations import accepted_along
from tiny import HIDDEN, byte_tokenizer

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.distill.corpus.examples import Examples
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.read_texts import ReadTexts
from redrafter_mlx.distill.corpus.shards import Shard, save_shard
from redrafter_mlx.distill.drafter_forms import EagleForm
from redrafter_mlx.distill.evaluation.acceptance import simulate_steps
from redrafter_mlx.distill.forms.eagle_sequences import grouped, pad_together, unrolled_logits
from redrafter_mlx.distill.options_file import make_job
from redrafter_mlx.drafting.published.heads.eagle import EagleDrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.target_model.model import Target


@pytest.mark.parametrize(
    "name", ["EAGLE-3, the authors'", "EAGLE-3, speculators", "EAGLE-3.1", "EAGLE, two layers"]
)
def test_logits_in_training_are_those_of_drafting(
    name: str, model: nn.Module, tmp_path: Path
) -> None:
    """At every depth, along the same tokens, from two texts of different length in one batch."""
    sample = SAMPLES[name]
    folder = write_files(tmp_path / "drafter", sample, random_tensors(sample))
    drafter = load(folder, Target(model))
    layers = len(drafter.config.layers)
    texts, batch = two_texts(layers)
    network = drafter.module
    head = network.lm_head if drafter.config.own_head else Target(model).logits
    trained = unrolled_logits(network, Target(model).embedding, head, batch)
    unread = HIDDEN * bool(layers)
    training_drafts_as_decoding(trained, drafter, texts, batch, unread)


def test_soft_labels_are_the_targets_probabilities_of_the_label(model: nn.Module) -> None:
    target, student = Target(model).reading((0, 2)), fresh(Target(model))
    texts = written_texts(target)
    batch = pad_together(texts, 3, HIDDEN, prompts=False)
    teacher, S, compared = student.teacher(batch.states), batch.features.shape[1], 0
    for row, position in enumerate(batch.rows.tolist()):
        b, i = divmod(position, S)
        for depth in range(3):
            if batch.valid[row, depth].item():
                state = mx.array(texts[b].whole_states[i + 1 + depth])
                logits = target.logits(state[None, None])[0, 0][student.vocabulary.tokens]
                want = mx.softmax(logits.astype(mx.float32))
                np.testing.assert_allclose(teacher[row + 1 + depth], want, atol=1e-6)
                compared += 1
    assert compared == sum(3 * len(text.answer) - 3 - 2 - 1 for text in texts)


def test_the_steps_of_a_run_are_those_of_its_passes(model: nn.Module, tmp_path: Path) -> None:
    """A batch has fewer answer tokens than it may: it has prompts and padding, too."""
    student, texts = fresh(Target(model)), [random_text(150, 60, 2, seed=n) for n in range(40)]
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    for i, path in enumerate(paths):
        save_shard(Shard(texts[i::2], {}), path, {})
    options = replace(student.options, batch=512, epochs=3.0)
    student.options = options
    examples = Examples(tuple(paths), Extras(), options, 10**9)
    (lengths,) = examples.lengths(0)
    assert sorted(lengths) == [(150, 60)] * 40
    passes = [grouped(texts, 512, f"0 {epoch}") for epoch in range(3)]
    assert options.steps(student.batches(examples)) == sum(map(len, passes))
    assert sum(map(len, passes)) > 1.5 * 3 * 40 * 60 / 512


def test_the_saved_files_are_those_of_speculators(model: nn.Module, tmp_path: Path) -> None:
    """Compares their names and shapes, and their logits with the equations'."""
    target = Target(model)
    save(fresh(target), tmp_path)
    tensors = dict(mx.load(str(tmp_path / "model.safetensors")))  # type: ignore[arg-type]
    H, inner = HIDDEN, HIDDEN * 8 // 3
    layer = {
        "self_attn.q_proj": (H, 2 * H), "self_attn.k_proj": (H, 2 * H),
        "self_attn.v_proj": (H, 2 * H), "self_attn.o_proj": (H, H), "mlp.gate_proj": (inner, H),
        "mlp.up_proj": (inner, H), "mlp.down_proj": (H, inner), "hidden_norm": (H,),
        "input_layernorm": (H,), "post_attention_layernorm": (H,),
    }  # fmt: skip
    shapes = {f"layers.0.{name}.weight": shape for name, shape in layer.items()} | {
        "fc.weight": (H, 2 * H), "fc_norm.0.weight": (H,), "fc_norm.1.weight": (H,),
        "norm.weight": (H,), "lm_head.weight": (60, H), "d2t": (60,), "t2d": (VOCAB,),
    }  # fmt: skip
    assert {name: array.shape for name, array in tensors.items()} == shapes
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 2]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    drafted = np.arange(60) + np.array(tensors["d2t"])
    assert drafted.tolist() == np.flatnonzero(np.array(tensors["t2d"])).tolist()

    drafter, rng = load(tmp_path, target), np.random.default_rng(0)
    read = Sample(config=config, nested=True, features=2, outputs=60, head_size=H)
    arrays = {name: np.array(array).astype(np.float64) for name, array in tensors.items()}
    equations = Reference(read, arrays, np.array(model.model.embed_tokens.weight), np.zeros(0))
    tokens, features = rng.integers(0, VOCAB, 9).tolist(), rng.normal(size=(8, 3 * H))
    want = equations.logits(features[:, : 2 * H], tokens[1:], [])
    levels = drafter.levels(drafter.empty(1), seen(tokens, features, 0, 8, 8), 1)
    np.testing.assert_allclose(levels.first()[0, 0], want, atol=1e-3 * want.std())


def test_what_a_fresh_drafter_reads_has_one_size_in_every_coordinate(model: nn.Module) -> None:
    student = fresh(Target(model))
    texts = written_texts(Target(model).reading((0, 2)))
    whole = np.concatenate([text.whole_states for text in texts])
    read = mx.array(whole[:, : 2 * HIDDEN], mx.float32)
    context = np.array(student.network.fuse(read))
    np.testing.assert_allclose(np.sqrt((context**2).mean(axis=0)), 1, rtol=1e-3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"context_layers": ()}, "context_layers"),
        ({"context_layers": (4, 2)}, "rising order"),
        ({"context_layers": (1, 2)}, "begins with 1"),
        ({"inner_dim": 0}, "inner_dim"),
        ({"draft_vocab": 0}, "draft_vocab"),
    ],
)
def test_a_form_that_no_drafter_can_have_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        EagleForm(**given)  # type: ignore[arg-type]


def test_layers_that_the_target_lacks_are_refused(model: nn.Module) -> None:
    with pytest.raises(BadInputError, match="cannot read layers 2, 9"):
        recipe_of(Target(model), context_layers=(2, 9))


def test_given_texts_are_trained_on_as_they_stand(tmp_path: Path) -> None:
    given = {"model": "m", "data": "d.jsonl", "drafter": {"form": "eagle"}}
    with pytest.raises(BadInputError, match="labels"):
        make_job(given, tmp_path)
    assert make_job(given | {"labels": "data"}, tmp_path).drafter == EagleForm()


@pytest.mark.parametrize("layers", [(), (0, 2)])
def test_stored_states_of_whole_texts_equal_those_of_reading_them(
    layers: tuple[int, ...], model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(model).reading(layers)
    texts, extras = written_texts(target, 12), Extras(layers, whole=True)
    forgotten = [replace(t, prompt_states=None, layer_inputs=None) for t in texts]
    computed = [text.whole_states for text in extras.compute(Target(model), forgotten)]
    for text, read in zip(texts, computed, strict=True):
        np.testing.assert_allclose(text.whole_states, read, atol=5e-3)
    shards = [tmp_path / f"block-{i:06}.safetensors" for i in range(2)]
    for shard, held in zip(shards, (forgotten, texts), strict=True):
        save_shard(Shard(held, {}), shard, {})
    extras.add(target, byte_tokenizer(), shards[0], 0)
    monkeypatch.setattr(target, "hidden", None)  # any further reading fails
    extras.add(target, byte_tokenizer(), shards[1], 0, texts)
    for shard in shards:
        assert all(path.exists() for path in extras.files(shard))
        for text, read in zip(extras.load(shard), computed, strict=True):
            np.testing.assert_allclose(text.whole_states, read, atol=5e-3)


def test_texts_that_are_only_read_are_kept_whole_too(model: nn.Module, tmp_path: Path) -> None:
    """A first token has no state; of two texts with a shared prefix, the second adds the rest."""
    target, shard = Target(model).reading((0, 2)), tmp_path / "block-000000.safetensors"
    texts = ["read this text", "read this one", "and another"]
    read = ReadTexts(tuple(Conversation((text,)) for text in texts))
    extras = Extras((0, 2), (read,), whole=True)
    save_shard(Shard([], {}), shard, {})
    extras.add(target, byte_tokenizer(), shard, 0)
    (path,) = extras.read_shards(shard)
    found = extras.each.load(path)
    assert len(found) == 3
    assert 1 in [len(text.prompt) for text in found]
    for text in found:
        assert len(text.whole_states) == len(text.prompt) + len(text.answer) - 1
        batch = pad_together([text], 3, HIDDEN, prompts=True)
        assert not any(batch.hard.tolist())


def test_simulated_steps_equal_those_of_decoding(model: nn.Module) -> None:
    """For a drafter that remembers the text: with a wrong memory its drafts would differ."""
    target, student = Target(model), fresh(Target(model))
    drafter = EagleDrafter("EAGLE-3", student.network, target, student.vocabulary)
    shape, seen_steps = BeamShape(3, 4), []
    for text in Extras((0, 2), whole=True).compute(target, written_texts(target, 60)):
        accepted = accepted_along(drafter, [text], shape)
        simulated = simulate_steps(accepted, np.zeros(len(text.answer))).tolist()
        decoder = Decoder(target.reading((0, 2)), drafter, shape, SamplingParams())
        tokens, results = run(decoder, text.prompt, 60)
        assert tokens == text.answer.tolist()
        assert simulated == [len(r.tokens) - 1 for r in results[1:]][: len(simulated)]
        assert len(simulated) > 5
        seen_steps += simulated
    assert set(seen_steps) >= {0, 1}
