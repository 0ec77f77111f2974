"""EAGLE drafters: their equations, their memory of true features, and every published layout."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from decoding import counted
from draft_models import GREEDY, PROMPT, drafter_for, run
from drafter_laws import (
    accepted,
    after_three_pieces,
    conversation_says_what_a_plain_one_does,
    decoder_with,
    remembers_true_features_alone,
    rows_accept_what_they_would_alone,
    three_levels,
    wrong_pair_is_refused_before_weights_are_read,
)
from eagle_files import TRAINED, changed_config, features_of, load
from eagle_samples import (
    INNER,
    LAYERS,
    SAMPLES,
    VOCAB,
    Reference,
    Sample,
    Tensors,
    random_tensors,
    write_files,
)
from hybrids import hybrid_model
from policies import Alternating
from tiny import HIDDEN, byte_model, plain_tokens, random_model, truncated

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.decoding.step import Decoder, Prefill
from redrafter_mlx.drafting.combined import Combined
from redrafter_mlx.drafting.interface import Drafter, Features
from redrafter_mlx.drafting.published.heads.eagle import EagleDrafter
from redrafter_mlx.errors import DamagedFileError, MismatchError, UnsupportedModelError
from redrafter_mlx.speculation.static_tree import StaticTree
from redrafter_mlx.target_model.model import Target

SHAPES = [BeamShape(1, 2), BeamShape(1, 4), BeamShape(3, 4), BeamShape(4, 5, 9)]


def reference(sample: Sample, tensors: Tensors, model: nn.Module) -> Reference:
    own = sample.hidden_size != HIDDEN
    embedding = tensors["embed_tokens.weight"] if own else model.model.embed_tokens.weight
    return Reference(sample, tensors, np.array(embedding), np.array(model.lm_head.weight))


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_logits_of_three_levels_equal_the_equations(
    sample: Sample, model: nn.Module, tmp_path: Path
) -> None:
    """With published files, on a tree, after a text that was read in three pieces."""
    tensors = random_tensors(sample)
    drafter = load(write_files(tmp_path / "drafter", sample, tensors), Target(model))
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCAB, 12).tolist()
    width = sample.features * HIDDEN
    features = rng.normal(size=(11, width + HIDDEN * (sample.form == 3)))  # final norm last
    got, drafts = three_levels(after_three_pieces(drafter, tokens, features, 3))
    equations = reference(sample, tensors, model)
    want = [equations.logits(features[:, :width], tokens[1:], path) for path in drafts]
    assert np.std(want) > 0.3
    np.testing.assert_allclose(got, np.stack(want), atol=1e-4 * np.std(want))


@pytest.mark.parametrize(
    ("name", "shape"), [*(("EAGLE-3", shape) for shape in SHAPES), ("EAGLE", SHAPES[-1])], ids=str
)
def test_tokens_equal_autoregression(
    name: str, shape: BeamShape, model: nn.Module, trained: dict[str, Path]
) -> None:
    decoder = decoder_of(trained[name], model, shape)
    said, results, _ = run(decoder, 50)
    assert said == plain_tokens(model, PROMPT, 50)
    assert max(len(r.tokens) for r in results) > 1


def test_a_target_with_recurrent_states_says_what_it_says_alone(tmp_path: Path) -> None:
    model = hybrid_model("qwen3_5", vocab_size=VOCAB, num_hidden_layers=LAYERS)
    sample = SAMPLES["EAGLE-3, the authors'"]
    folder = write_files(tmp_path / "d", sample, random_tensors(sample))
    said, _, _ = run(decoder_of(folder, model, BeamShape(3, 4)), 30)
    assert said == plain_tokens(model, PROMPT, 30)


def test_it_drafts_along_a_static_tree(model: nn.Module, trained: dict[str, Path]) -> None:
    tree = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)))
    decoder = decoder_of(trained["EAGLE"], model, tree.shape)
    assert isinstance(decoder.drafter, EagleDrafter)
    said, _, _ = run(replace(decoder, drafter=decoder.drafter.along(tree)), 30)
    assert said == plain_tokens(model, PROMPT, 30)


decoder_of = partial(decoder_with, load)


@pytest.mark.parametrize("name", TRAINED)
def test_a_drafter_that_has_learned_the_text_is_accepted(
    name: str, model: nn.Module, trained: dict[str, Path]
) -> None:
    """It is not accepted if each token comes with the features of the position before."""
    decoder = decoder_of(trained[name], model, BeamShape(1, 2))
    assert accepted(decoder) > 0.85
    assert isinstance(decoder.drafter, EagleDrafter)
    rows = decoder.drafter.rows
    honest = rows.context
    rows.context = lambda seen: mx.roll(honest(seen), 1, axis=1)  # type: ignore[method-assign]
    assert accepted(decoder) < 0.7


def test_features_of_other_layers_are_accepted_less(
    model: nn.Module, trained: dict[str, Path], tmp_path: Path
) -> None:
    layers = {"eagle_aux_hidden_state_layer_ids": [4, 5, 6]}
    folder = changed_config(trained["EAGLE-3"], tmp_path, **layers)
    assert accepted(decoder_of(folder, model, BeamShape(1, 2))) < 0.7


@pytest.mark.parametrize(
    "shapes",
    [
        (BeamShape(3, 4),),
        (BeamShape(1, 2), PLAIN, PLAIN, BeamShape(3, 5), PLAIN),
        (PLAIN, PLAIN, PLAIN, PLAIN, PLAIN, PLAIN, BeamShape(2, 2)),
    ],
    ids=len,
)
@pytest.mark.parametrize("name", [*TRAINED, "both"])
def test_it_remembers_true_features_alone(
    name: str, shapes: tuple[BeamShape, ...], model: nn.Module, trained: dict[str, Path]
) -> None:
    """After any step, its cache equals one computed afresh from the text's own features."""
    target = Target(model)
    parts = [load(trained[part], target) for part in (TRAINED if name == "both" else [name])]
    drafter: Drafter = parts[0] if len(parts) == 1 else Combined(*parts)
    decoder = Decoder(target.reading(drafter.features.layers), drafter, PLAIN, GREEDY)
    text = mx.array([[*PROMPT, *plain_tokens(model, PROMPT, 60)]])
    features = {part: features_of(part, model, text) for part in parts}
    for n in (8, 40):
        remembers_true_features_alone(decoder, features, text, n, shapes)


@pytest.mark.parametrize("shape", [BeamShape(1, 2), BeamShape(3, 4)], ids=str)
def test_a_step_calls_the_network_once_for_each_drafted_token(
    shape: BeamShape, model: nn.Module, trained: dict[str, Path]
) -> None:
    decoder = decoder_of(trained["EAGLE-3"], model, shape)
    assert isinstance(decoder.drafter, EagleDrafter)
    with counted(decoder.drafter.rows, "call", "run") as calls:
        _, results, _ = run(decoder, 20)
    drafts = len(results) + 1  # after the prompt, after each step, and one not submitted
    assert calls[0] == len(PROMPT) - 1
    assert len(calls) == 1 + drafts * (shape.length - 1)
    with counted(decoder.drafter.rows, "call", "run") as calls:
        run(decoder, 20, shapes=Alternating(PLAIN))
    assert calls == [], "an idle drafter is not called"


def test_features_of_few_positions_are_kept_for_an_idle_drafter(
    model: nn.Module, trained: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redrafter_mlx.decoding.cache.sequence_cache.MAX_MISSED", 6)
    decoder = decoder_of(trained["EAGLE-3"], model, PLAIN)
    assert isinstance(decoder.drafter, EagleDrafter)
    with counted(decoder.drafter.rows, "call", "run") as calls:
        said, _, cache = run(decoder, 20)
    assert said == plain_tokens(model, PROMPT, 20)
    assert calls == [len(PROMPT) - 1, 6, 6, 6]
    assert len(cache.missed) < 6


@pytest.fixture(params=["EAGLE-3", "a draft model"])
def decoder(request: pytest.FixtureRequest, model: nn.Module, trained: dict[str, Path]) -> Decoder:
    """Return a decoder with a drafter that has a KV cache of its own."""
    shape = BeamShape(3, 4)
    if request.param in TRAINED:
        return decoder_of(trained[request.param], model, shape)
    target = Target(model)
    return Decoder(target, drafter_for(target, truncated(model, 2)), shape, GREEDY)


@pytest.mark.parametrize("chunk", [2, 3, 7])
def test_a_prompt_that_is_read_in_chunks_drafts_the_same(
    chunk: int, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole, _ = run(decoder, 40)
    monkeypatch.setattr("redrafter_mlx.decoding.step.PREFILL_CHUNK", chunk)
    _, pieces, _ = run(decoder, 40)
    assert [r.tokens for r in pieces] == [r.tokens for r in whole]


@pytest.mark.parametrize("chunk", [60, 100, 999])
def test_a_prompt_grows_the_buffers_of_the_memory_once(chunk: int, decoder: Decoder) -> None:
    prompt = [i % VOCAB for i in range(600)]
    prefill = Prefill(decoder.target, decoder.drafter, decoder.new_cache(), 0, [prompt])
    capacities = set()
    while prefill.left:
        prefill.read(chunk)
        capacities |= {keys.shape[2] for keys, _ in prefill.cache.memory}
    assert capacities == {prefill.cache.target.capacity}


@pytest.mark.parametrize("shape", [PLAIN, BeamShape(2, 4)])
def test_rows_that_join_and_leave_accept_what_they_would_alone(
    model: nn.Module, trained: dict[str, Path], shape: BeamShape
) -> None:
    decoder = decoder_of(trained["EAGLE-3"], model, shape)
    rows_accept_what_they_would_alone(decoder, 4, GREEDY)


@pytest.mark.parametrize("name", TRAINED)
def test_conversations_with_automatic_shapes_say_what_plain_ones_do(
    name: str, model: nn.Module, trained: dict[str, Path]
) -> None:
    conversation_says_what_a_plain_one_does(model, load(trained[name], Target(model)))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("EAGLE-3, the authors'", (2, 3, 4)),
        ("EAGLE-3, speculators", (2, 3, 4)),
        ("EAGLE-3, layers by their outputs", (2, 5, 6)),
        ("EAGLE-3, DeepSpec", (1, 2, 3, 5, 6)),
        ("EAGLE, with a bias", ()),
    ],
)
def test_layers_are_those_whose_inputs_the_files_mean(
    name: str, layers: tuple[int, ...], model: nn.Module, tmp_path: Path
) -> None:
    folder = write_files(tmp_path / "d", SAMPLES[name], random_tensors(SAMPLES[name]))
    features = load(folder, Target(model)).features
    assert features == Features(layers, hidden=not layers, every_position=True)


def test_what_can_be_drafted_is_in_the_draft_vocabulary(model: nn.Module, tmp_path: Path) -> None:
    sample = SAMPLES["EAGLE-3, the authors'"]
    tensors = random_tensors(sample)
    drafter = load(write_files(tmp_path / "d", sample, tensors), Target(model))
    allowed = np.flatnonzero(tensors["t2d"])
    vocabulary = drafter.rows.vocabulary
    assert vocabulary.to_tokens(mx.arange(sample.outputs)).tolist() == allowed.tolist()
    everywhere = vocabulary.over_vocabulary(mx.zeros((1, 2, sample.outputs)))
    assert np.flatnonzero(np.isfinite(everywhere[0, 1])).tolist() == allowed.tolist()
    assert drafter.max_width == sample.outputs


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hidden_size": 48}, "target hidden size is 32, the target's is 48"),
        ({"vocab_size": 300}, "vocabulary is 258, the target's is 300"),
        ({"num_hidden_layers": 4}, r"layers \[2, 2, 1\].*layers 0 to 3"),
    ],
    ids=str,
)
def test_a_wrong_pair_is_refused_before_weights_are_read(
    wrong: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = SAMPLES["EAGLE-3, the authors'"]
    folder = write_files(tmp_path / "d", sample, random_tensors(sample))
    other = random_model(**{"vocab_size": VOCAB, "num_hidden_layers": LAYERS} | wrong)
    wrong_pair_is_refused_before_weights_are_read(load, folder, other, message, monkeypatch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra.weight": np.ones((2, 2))}, "holds tensor extra.weight"),
        ({"layers.0.mlp.gate_proj.bias": np.ones(INNER)}, "lacks tensor layers.0.mlp.*bias"),
        ({"layers.0.mlp.up_proj.bias": np.ones(INNER)}, "holds tensor layers.0.mlp.up_proj.bias"),
        ({"norm.weight": None}, r"lacks tensor norm.weight of shape \[32\]"),
        ({"fc.weight": np.ones((32, 95))}, "fc.weight has 95 columns"),
        ({"lm_head.weight": np.full((61, 32), np.nan)}, "lm_head.weight holds values that are not"),
        ({"lm_head.weight": None}, "lacks tensor lm_head.weight"),
        ({"d2t": None}, r"lacks tensor d2t of shape \[61\]"),
        ({"d2t": np.full((61,), 200)}, "d2t does not lead to different tokens below 258"),
        ({"d2t": -np.arange(61)}, "d2t does not lead to different tokens"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_damaged_files_are_refused_by_tensor(
    change: Tensors, message: str, model: nn.Module, tmp_path: Path
) -> None:
    sample = SAMPLES["EAGLE-3, the authors'"]
    tensors = {n: t for n, t in (random_tensors(sample) | change).items() if t is not None}
    folder = write_files(tmp_path / "d", sample, tensors)
    with pytest.raises(DamagedFileError, match=message):
        load(folder, Target(model))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_attention_heads": 5}, DamagedFileError, "num_attention_heads 5"),
        ({"num_attention_heads": "4"}, DamagedFileError, "num_attention_heads is '4'"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, DamagedFileError, "a list of layers"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, MismatchError, "layers 0 to 6"),
        ({"rope_scaling": {"type": "llama3"}}, DamagedFileError, "rotary embedding"),
        ({"rope_scaling": 3}, DamagedFileError, "rope_scaling is 3"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act is 'gelu'"),
        ({"norm_output": 1}, DamagedFileError, "norm_output is 1"),
        (
            {"speculators_model_type": "eagle3", "partial_rotary_factor": 0.5},
            UnsupportedModelError,
            "partial_rotary_factor is 0.5",
        ),
        ({"eagle_config": {"use_aux_hidden_state": False}}, UnsupportedModelError, "use_aux"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            UnsupportedModelError,
            "another rotary scaling",
        ),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_keys_that_cannot_be_used_are_refused_by_name(
    change: dict[str, object], error: type[Exception], message: str, model: nn.Module,
    trained: dict[str, Path], tmp_path: Path,
) -> None:  # fmt: skip
    with pytest.raises(error, match=message):
        load(changed_config(trained["EAGLE-3"], tmp_path, **change), Target(model))


@pytest.mark.parametrize(("first", "window"), [({"max_window_layers": 0}, 4), ({}, None)], ids=str)
def test_a_window_is_that_of_the_layers_from_max_window_layers_on(
    first: dict[str, int], window: int | None, model: nn.Module, trained: dict[str, Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    keys = {"use_sliding_window": True, "sliding_window": 4, **first}
    folder = changed_config(trained["EAGLE-3"], tmp_path, **keys)
    assert load(folder, Target(model)).config.window == window


def test_a_quantised_target_gives_features_in_its_own_dtype(trained: dict[str, Path]) -> None:
    model = byte_model(num_hidden_layers=LAYERS)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4)
    decoder = decoder_of(trained["EAGLE-3"], model, BeamShape(2, 3))
    said, _, cache = run(decoder, 10)
    assert said == plain_tokens(model, PROMPT, 10)
    assert {array.dtype for pair in cache.memory for array in pair} == {mx.bfloat16}


def test_a_level_costs_the_bytes_that_it_reads(model: nn.Module, trained: dict[str, Path]) -> None:
    """A drafter without its own output layer reads the target's."""
    three, one = (load(trained[name], Target(model)) for name in ("EAGLE-3", "EAGLE"))
    D, inner = HIDDEN, 40
    layer = D * (3 * inner + 2 * D) + D  # feed-forward, o_proj and q_proj of D columns, a norm
    whole = sum(array.size for _, array in nn.utils.tree_flatten(model.parameters()))
    of_three = layer + 3 * D * D + D * D + 2 * 2 * 16 * D + 3 * D + VOCAB * D
    of_one = layer + 2 * D * D + 2 * 16 * D + VOCAB * D
    assert three.level_cost == pytest.approx(of_three / whole)
    assert one.level_cost == pytest.approx(of_one / whole)
    assert three.timing_key != one.timing_key


def test_layers_up_to_the_final_norms_input_can_be_read(model: nn.Module) -> None:
    tokens = mx.array([PROMPT])
    target = Target(model).reading((LAYERS - 1, LAYERS))
    got = target.append(tokens, target.new_cache(), 0)
    x, inputs = model.model.embed_tokens(tokens), []
    for layer in model.model.layers:
        inputs.append(x)
        x = layer(x, mask="causal")
    want = mx.concatenate([inputs[-1], x, model.model.norm(x)], axis=-1)
    np.testing.assert_allclose(got, want, atol=1e-4)
    with pytest.raises(MismatchError, match=f"layer {LAYERS + 1}"):
        Target(model).reading((LAYERS + 1,))


def test_vllms_repacks_of_eagle_load(model: nn.Module, tmp_path: Path) -> None:
    """Their config.json has the layer's keys in an object `model`."""
    sample = SAMPLES["EAGLE, with a bias"]
    folder = write_files(tmp_path / "d", sample, random_tensors(sample))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "eagle", "model": config}))
    assert load(folder, Target(model)).config.heads == 4


def test_a_parallel_head_is_refused_by_name(model: nn.Module, tmp_path: Path) -> None:
    sample = SAMPLES["EAGLE-3, the authors'"]
    tensors = random_tensors(sample) | {"mask_hidden": np.zeros((1, HIDDEN))}
    folder = write_files(tmp_path / "d", sample, tensors)
    with pytest.raises(UnsupportedModelError, match="P-EAGLE"):
        load(folder, Target(model))
