"""Block drafters: their equations, their memory of true features, and every published layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from block_samples import (
    RANK,
    SAMPLES,
    TRAINED,
    Reference,
    Sample,
    load,
    random_tensors,
    write_files,
)
from draft_models import GREEDY, PROMPT, run
from drafter_laws import (
    accepted,
    after_three_pieces,
    conversation_says_what_a_plain_one_does,
    decoder_with,
    remembers_true_features_alone,
    rows_accept_what_they_would_alone,
    wrong_pair_is_refused_before_weights_are_read,
)
from eagle_files import features_of, seen
from eagle_samples import LAYERS, VOCAB
from hybrids import HYBRIDS, hybrid_model
from tiny import HIDDEN, plain_tokens, random_model, sliding_model

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.interface import Features
from redrafter_mlx.drafting.published.blocks.dflash import BlockDrafter
from redrafter_mlx.drafting.published.blocks.rows import embedding_scale
from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.target_model.model import Target

SHAPES = [BeamShape(1, 2), BeamShape(1, 6), BeamShape(3, 4), BeamShape(4, 5, 9)]
decoder_of = partial(decoder_with, load)


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_logits_of_a_block_equal_the_equations(
    sample: Sample, model: nn.Module, tmp_path: Path
) -> None:
    """With published files, after a text that was read in three pieces."""
    tensors = random_tensors(sample)
    drafter = load(write_files(tmp_path / "drafter", sample, tensors), Target(model))
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCAB, 12).tolist()
    width = sample.features * HIDDEN
    features = rng.normal(size=(11, width + HIDDEN))  # final norm last
    equations = Reference(
        sample, tensors, np.array(model.model.embed_tokens.weight), np.array(model.lm_head.weight)
    )
    drafts = sample.rows - sample.first_row
    assert drafter.max_length == drafts + 1
    levels = after_three_pieces(drafter, tokens, features, drafts)
    outputs = [levels.first()]
    paths: list[list[int]] = [[]]
    for depth in range(1, drafts):
        last, parents = paths[-3:], [2, 0, 2] if depth > 1 else [0, 0, 0]
        new = rng.integers(0, VOCAB, 3).tolist()
        paths += [[*last[p], token] for p, token in zip(parents, new, strict=True)]
        outputs.append(levels.following(mx.array([parents]), mx.array([new])))
    read, root = features[:, :width], tokens[11]
    if sample.candidates:
        want = np.stack([equations.selected(read, root, path) for path in paths])
    elif sample.markov is None:
        plain = equations.logits(read, root)
        want = np.stack([plain[len(path)] for path in paths])
    else:
        want = np.stack([equations.corrected(read, root, path) for path in paths])
    spread = np.std(want[np.isfinite(want)])
    assert spread > 0.3
    got = mx.concatenate(outputs, axis=1)[0]
    np.testing.assert_allclose(got, want, atol=1e-4 * spread)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=[] if shape in SHAPES[2:] else pytest.mark.exhaustive)
        for name in TRAINED
        for shape in SHAPES
    ],
    ids=str,
)
def test_tokens_equal_autoregression(
    name: str, shape: BeamShape, model: nn.Module, trained: dict[str, Path]
) -> None:
    said, results, _ = run(decoder_of(trained[name], model, shape), 50)
    assert said == plain_tokens(model, PROMPT, 50)
    assert max(len(r.tokens) for r in results) > 1


@pytest.mark.parametrize("name", ["DFlash", "DSpark"])
def test_a_drafter_that_has_learned_the_text_is_accepted(
    name: str, model: nn.Module, trained: dict[str, Path]
) -> None:
    """It is not accepted if its context rows are those of other positions."""
    decoder = decoder_of(trained[name], model, BeamShape(1, 4))
    knowing = accepted(decoder)
    assert knowing > 1.2
    assert isinstance(decoder.drafter, BlockDrafter)
    network = decoder.drafter.rows.network
    honest = network.context
    network.context = lambda features: honest(mx.flip(features, axis=2))  # type: ignore[method-assign]
    assert accepted(decoder) < knowing / 2


@pytest.mark.parametrize(
    "shapes", [(BeamShape(3, 4),), (BeamShape(1, 2), PLAIN, PLAIN, BeamShape(3, 5), PLAIN)], ids=len
)
@pytest.mark.parametrize("name", ["DFlash"])
def test_it_remembers_true_features_alone(
    name: str, shapes: tuple[BeamShape, ...], model: nn.Module, trained: dict[str, Path]
) -> None:
    """After any step, its cache equals one computed afresh from the text's own features."""
    decoder = decoder_of(trained[name], model, PLAIN)
    text = mx.array([[*PROMPT, *plain_tokens(model, PROMPT, 60)]])
    features = {decoder.drafter: features_of(decoder.drafter, model, text)}
    for n in (8, 40):
        remembers_true_features_alone(decoder, features, text, n, shapes)


@pytest.mark.parametrize("chunk", [2, 7])
def test_a_prompt_that_is_read_in_chunks_drafts_the_same(
    chunk: int, model: nn.Module, trained: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_of(trained["DFlash"], model, BeamShape(3, 4))
    _, whole, _ = run(decoder, 30)
    monkeypatch.setattr("redrafter_mlx.decoding.step.PREFILL_CHUNK", chunk)
    _, pieces, _ = run(decoder, 30)
    assert [r.tokens for r in pieces] == [r.tokens for r in whole]


@pytest.mark.parametrize("name", ["DFlash", "DSpark"])
def test_rows_that_join_and_leave_accept_what_they_would_alone(
    name: str, model: nn.Module, trained: dict[str, Path]
) -> None:
    decoder = decoder_of(trained[name], model, BeamShape(2, 4))
    rows_accept_what_they_would_alone(decoder, 4, GREEDY)


@pytest.mark.parametrize("name", TRAINED)
def test_draws_depend_on_the_seed_alone(
    name: str, model: nn.Module, trained: dict[str, Path]
) -> None:
    params = SamplingParams(0.7)
    decoder = decoder_of(trained[name], model, BeamShape(3, 5), params)
    plain = Decoder(Target(model), None, PLAIN, params)
    lengths = []
    for seed in range(3):
        said, results, _ = run(decoder, 40, seed)
        assert said == run(plain, 40, seed)[0]
        lengths += [len(r.tokens) for r in results]
    assert max(lengths) > 1


@pytest.mark.parametrize("name", ["DSpark", "DFlash 2"])
def test_conversations_with_automatic_shapes_say_what_plain_ones_do(
    name: str, model: nn.Module, trained: dict[str, Path]
) -> None:
    conversation_says_what_a_plain_one_does(model, load(trained[name], Target(model)))


def test_a_bidirectional_block_is_whole_and_a_causal_one_as_long_as_its_drafts(
    model: nn.Module, tmp_path: Path
) -> None:
    """The rows that are left out could not have changed the others."""
    tokens, features = [*range(5)], np.ones((4, 4 * HIDDEN))
    read = seen(tokens, features, 0, 4, 4)
    for name in ("DFlash, the authors'", "JetSpec"):
        sample = SAMPLES[name]
        drafter = load(write_files(tmp_path / name, sample, random_tensors(sample)), Target(model))
        few = drafter.levels((), read, 2)
        all_ = drafter.levels((), read, drafter.config.drafts)
        for _ in range(2):
            np.testing.assert_allclose(few.first(), all_.first(), atol=1e-5)
        rows = drafter.rows.call(read, drafter.new_cache(), 2)
        assert rows.shape == (1, 2, HIDDEN)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("DFlash, the authors'", (2, 4, 5)),
        ("DFlash, speculators", (2, 4, 5)),
        ("DFlash, with sinks, and layers that follow from their number", (2, 5)),
        ("DSpark, DeepSpec", (2, 4, 5)),
    ],
)
def test_layers_are_those_whose_inputs_the_files_mean(
    name: str, layers: tuple[int, ...], model: nn.Module, tmp_path: Path
) -> None:
    folder = write_files(tmp_path / "d", SAMPLES[name], random_tensors(SAMPLES[name]))
    assert load(folder, Target(model)).features == Features(layers, every_position=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hidden_size": 48}, "target hidden size is 32, the target's is 48"),
        ({"vocab_size": 300}, "vocabulary is 258, the target's is 300"),
        ({"num_hidden_layers": 4}, r"layers \[2, 4, 5\].*layers 0 to 3"),
    ],
    ids=str,
)
def test_a_wrong_pair_is_refused_before_weights_are_read(
    wrong: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = SAMPLES["DFlash, the authors'"]
    folder = write_files(tmp_path / "d", sample, random_tensors(sample))
    other = random_model(**{"vocab_size": VOCAB, "num_hidden_layers": LAYERS} | wrong)
    wrong_pair_is_refused_before_weights_are_read(load, folder, other, message, monkeypatch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra.weight": np.ones((2, 2))}, "holds tensor extra.weight"),
        ({"norm.weight": None}, r"lacks tensor norm.weight of shape \[32\]"),
        ({"fc.weight": np.ones((32, 95))}, "fc.weight has 95 columns"),
        ({"fc.weight": np.full((32, 96), np.nan)}, "fc.weight holds values that are not finite"),
    ],
)
def test_damaged_files_name_the_tensor(
    change: dict[str, np.ndarray | None], message: str, model: nn.Module, tmp_path: Path
) -> None:
    sample = SAMPLES["DFlash, the authors'"]
    tensors = {**random_tensors(sample), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    folder = write_files(tmp_path / "d", replace(sample, prefix=""), kept)
    with pytest.raises(DamagedFileError, match=message):
        load(folder, Target(model))


def test_a_target_that_scales_its_embeddings_scales_the_blocks() -> None:
    for name, scale in (("llama", 1.0), ("gemma", HIDDEN**0.5), ("granite", 3.0)):
        assert embedding_scale(Target(random_model(name))) == pytest.approx(scale, rel=1e-5)


def test_calibration_finds_the_layers_and_the_row_that_a_drafter_was_trained_with(
    model: nn.Module, trained: dict[str, Path]
) -> None:
    readings = load(trained["DFlash"], Target(model)).readings()
    layers = {words: reading.features.layers for words, reading in readings.items()}
    assert layers == {
        "layers one earlier": (1, 3, 4),
        "layers one later": (3, 5, 6),
        "the other first row": (2, 4, 5),
    }
    assert readings["the other first row"].max_length == 7


def test_a_block_is_paid_once_and_a_correction_at_each_level(
    model: nn.Module, trained: dict[str, Path]
) -> None:
    """By the bytes that are read, as shares of those of the target's call."""
    whole = nbytes_of(model)
    for name, corrected in (("DFlash", 0), ("DSpark", VOCAB * RANK * 4), ("DFlash 2", 0)):
        drafter = load(trained[name], Target(model))
        assert drafter.level_cost == pytest.approx(corrected / whole)
        head = nbytes_of(model.lm_head)
        assert drafter.block_cost == pytest.approx(
            min((nbytes_of(drafter.modules[0]) - corrected + head) / whole, 1.0)
        )


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "gemma3_text"])
def test_targets_with_states_windows_and_scaled_embeddings_say_what_they_say_alone(
    name: str, tmp_path: Path
) -> None:
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": LAYERS}
    model = hybrid_model(name, **sizes) if name in HYBRIDS else sliding_model(name, **sizes)
    sample = SAMPLES["DSpark, DeepSpec"]
    folder = write_files(tmp_path / "d", sample, random_tensors(sample))
    said, _, _ = run(decoder_of(folder, model, BeamShape(3, 4)), 30)
    assert said == plain_tokens(model, PROMPT, 30)
