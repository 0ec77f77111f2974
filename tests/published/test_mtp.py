"""MTP heads: their equations, their memory of true features, every packaging, and what is typed."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from command_line import CommandLine
from draft_models import GREEDY, PROMPT, run
from drafter_laws import (
    after_three_pieces,
    conversation_says_what_a_plain_one_does,
    decoder_with,
    generated,
    logits_along,
    remembers_true_features_alone,
    rows_accept_what_they_would_alone,
    three_levels,
    wrong_pair_is_refused_before_weights_are_read,
)
from fake_hub import FakeHub
from fake_hub import hub as hub
from grammar_samples import grammars_say_what_plain_answers_say
from hybrids import hybrid_model
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from mtp_samples import (
    DEEPSEEK_LIKE,
    VOCAB,
    Reference,
    Tensors,
    as_deepseeks,
    as_mimos,
    load,
    nemotron,
    nemotrons_logits,
    quantised,
    random_head,
    random_nemotron_head,
    target_model,
    with_fused_experts,
    with_joined_heads,
    with_single_experts,
    without_ones,
    write_head,
    write_model,
)
from tiny import HIDDEN, byte_tokenizer, plain_tokens

import redrafter_mlx
from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.files.drafter_files import parameters_of
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.published.heads.mtp import MtpDrafter, layer_like
from redrafter_mlx.errors import DamagedFileError, UnsupportedModelError
from redrafter_mlx.target_model.model import Target

SHAPES = [BeamShape(1, 2), BeamShape(3, 4), BeamShape(4, 5, 9)]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return target_model()


decoder_of = partial(decoder_with, load)


def test_logits_of_three_levels_equal_the_equations(model: nn.Module, tmp_path: Path) -> None:
    """On a tree, after a text that was read in three pieces."""
    tensors = random_head(model)
    drafter = load(write_head(tmp_path / "d", without_ones(tensors)), Target(model))
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCAB, 12).tolist()
    hidden = rng.normal(size=(11, HIDDEN))
    got, drafts = three_levels(after_three_pieces(drafter, tokens, hidden, 3))
    equations = Reference(model, tensors)
    want = np.stack([equations.logits(tokens, hidden, path)[-1] for path in drafts])
    assert np.std(want) > 0.3
    np.testing.assert_allclose(got, want, atol=1e-4 * np.std(want))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("qwen3_5", shape) for shape in SHAPES),
        ("qwen3_5_moe", SHAPES[-1]),
        ("qwen3_next", SHAPES[-1]),
        *((name, SHAPES[-1]) for name in DEEPSEEK_LIKE),
    ],
    ids=str,
)
def test_tokens_equal_autoregression(name: str, shape: BeamShape, tmp_path: Path) -> None:
    model = target_model(name)
    tensors = random_head(model)
    if name in DEEPSEEK_LIKE:
        tensors = as_deepseeks(tensors)
    decoder = decoder_of(write_head(tmp_path / "d", tensors), model, shape)
    said, _, _ = run(decoder, 30)
    assert said == plain_tokens(model, PROMPT, 30)


@pytest.mark.parametrize(
    "shapes", [(BeamShape(3, 4),), (BeamShape(1, 2), PLAIN, PLAIN, BeamShape(3, 5))], ids=len
)
def test_it_remembers_true_features_alone(
    shapes: tuple[BeamShape, ...], model: nn.Module, tmp_path: Path
) -> None:
    """After any step, its cache equals one computed afresh from the text's own features."""
    decoder = decoder_of(write_head(tmp_path / "d", random_head(model)), model, PLAIN)
    text = mx.array([[*PROMPT, *plain_tokens(model, PROMPT, 40)]])
    features = {decoder.drafter: model.language_model.model(text)}
    remembers_true_features_alone(decoder, features, text, 25, shapes)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0)], ids=lambda p: p.method)
def test_rows_that_join_and_leave_accept_what_they_would_alone(
    params: SamplingParams, model: nn.Module, tmp_path: Path
) -> None:
    folder = write_head(tmp_path / "d", random_head(model))
    decoder = decoder_of(folder, model, BeamShape(2, 4), params)
    rows_accept_what_they_would_alone(decoder, 3, params)


def test_conversations_say_what_plain_ones_do(model: nn.Module, tmp_path: Path) -> None:
    drafter = load(write_head(tmp_path / "d", random_head(model)), Target(model))
    conversation_says_what_a_plain_one_does(model, drafter)


PACKAGINGS = {
    "split off": lambda t: t,
    "split off, quantised": quantised,
    "split off, without ones": without_ones,
    "split off, experts fused": lambda t: with_fused_experts(without_ones(t)),
    "split off, experts one by one": lambda t: with_single_experts(without_ones(t)),
}


@pytest.mark.parametrize("packaging", PACKAGINGS)
def test_every_packaging_is_the_same_head(packaging: str, tmp_path: Path) -> None:
    """Among others, norms get the 1 that they were stored without, and no others do."""
    model = target_model("qwen3_5_moe" if "experts" in packaging else "qwen3_5")
    tensors = random_head(model)
    target = Target(model)
    stored = PACKAGINGS[packaging](tensors)
    for prefix in ("", "mtp."):
        drafter = load(write_head(tmp_path / f"d{prefix}", stored, prefix), target)
        found = parameters_of(drafter.rows.network)
        assert found.keys() == tensors.keys()
        for name, array in tensors.items():
            close = 0.01 if "quantised" in packaging and array.ndim > 1 else 1e-6
            np.testing.assert_allclose(found[name], array, atol=close)


@pytest.mark.parametrize("name", [*DEEPSEEK_LIKE, "mimo"])
def test_heads_in_other_layouts_draft_what_their_equations_say(name: str, tmp_path: Path) -> None:
    """By mlx-lm's own layer along one path; in the model's files, and split off."""
    model = target_model(name)
    tensors, target = random_head(model), Target(model)
    stored = {"model.layers.2.mlp.gate.weight": mx.zeros((4, HIDDEN))}  # of the model itself
    folders = {}
    if name == "mimo":
        stored |= as_mimos(tensors, "model.mtp_layers.0.")
    else:
        stored |= as_deepseeks(with_joined_heads(tensors), "model.layers.3.")
        folders[write_head(tmp_path / "off", as_deepseeks(tensors))] = False
    folders[write_head(tmp_path / "in", stored)] = True
    rng = np.random.default_rng(1)
    tokens, hidden = rng.integers(0, VOCAB, 9).tolist(), rng.normal(size=(8, HIDDEN))
    want = logits_by_mlx_lm(model, tensors, tokens, mx.array(hidden, mx.float32), [5, 60])
    for folder, in_model in folders.items():
        drafter = DrafterFolder(folder, in_model=in_model).bind(target, byte_tokenizer())
        assert isinstance(drafter, MtpDrafter)
        got = logits_along(drafter, tokens, hidden, [5, 60])
        np.testing.assert_allclose(got, want, atol=1e-4 * np.std(want))


def logits_by_mlx_lm(
    model: nn.Module, tensors: Tensors, tokens: list[int], hidden: mx.array, drafts: list[int]
) -> np.ndarray:
    """Return logits [1 + drafts, V] of a text, and after each of the drafts that follow it.

    What DeepSeek's heads feed back has not been through the last norm; MiMo's has, and MiMo's read
    the hidden state first.
    """
    layer = layer_like(Target(model))
    own = {n.removeprefix("layers.0."): a for n, a in tensors.items() if n.startswith("layers.")}
    layer.load_weights(list(own.items()))
    cache, mimo = KVCache(), model.model_type == "mimo"

    def norm(x: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x, tensors[f"{name}.weight"], layer.input_layernorm.eps)

    def row(token: int, h: mx.array) -> mx.array:
        embedded = norm(model.model.embed_tokens(mx.array([[token]])), "pre_fc_norm_embedding")
        both = [embedded, norm(h, "pre_fc_norm_hidden")]
        joined = mx.concatenate(both[::-1] if mimo else both, axis=-1)
        out: mx.array = layer(joined @ tensors["fc.weight"].T, None, cache)
        return out

    outputs = [row(token, h[None, None]) for token, h in zip(tokens[1:], hidden, strict=True)][-1:]
    for token in drafts:
        outputs.append(row(token, norm(outputs[-1], "norm") if mimo else outputs[-1]))
    return np.array(model.lm_head(norm(mx.concatenate(outputs, axis=1), "norm"))[0])


@pytest.mark.parametrize("in_model", [False, True])
def test_nemotrons_heads_draft_what_their_equations_say(in_model: bool, tmp_path: Path) -> None:
    """By mlx-lm's own blocks along one path; their attention knows no positions."""
    model = nemotron()
    tensors, target = random_nemotron_head(model), Target(model)
    stored = with_single_experts(tensors)
    folder = write_head(tmp_path / "d", stored, "mtp." if in_model else "")
    drafter = DrafterFolder(folder, in_model=in_model).bind(target, byte_tokenizer())
    assert isinstance(drafter, MtpDrafter)
    rng = np.random.default_rng(1)
    tokens, hidden = rng.integers(0, VOCAB, 9).tolist(), rng.normal(size=(8, HIDDEN))
    got = logits_along(drafter, tokens, hidden, [5, 60])
    want = nemotrons_logits(model, tensors, tokens, mx.array(hidden, mx.float32), [5, 60])
    np.testing.assert_allclose(got, want, atol=1e-4 * np.std(want))
    decoder = Decoder(target, drafter, SHAPES[-1], GREEDY)
    assert run(decoder, 20)[0] == plain_tokens(model, PROMPT, 20)


def test_nemotrons_heads_need_a_nemotron(model: nn.Module, tmp_path: Path) -> None:
    tensors = random_nemotron_head(nemotron())
    folder = write_head(tmp_path / "d", with_single_experts(tensors))
    without_experts = hybrid_model("nemotron_h", vocab_size=VOCAB)
    for other, words in ((model, "qwen3_5"), (without_experts, "layers like its own")):
        with pytest.raises(UnsupportedModelError, match=words):
            load(folder, Target(other))
    tensors["layers.2.norm.weight"] = tensors["layers.2.mixer.conv1d.weight"] = mx.ones(HIDDEN)
    with pytest.raises(UnsupportedModelError, match="layer 2"):
        load(write_head(tmp_path / "e", tensors), Target(nemotron()))


def test_speculators_exports_are_the_same_head(model: nn.Module, tmp_path: Path) -> None:
    tensors = random_head(model)
    folder = write_head(tmp_path / "d", as_mimos(without_ones(tensors), "mtp_layers.0."))
    (folder / "config.json").write_text('{"speculators_model_type": "mtp"}', encoding="utf-8")
    found = parameters_of(load(folder, Target(model)).rows.network)
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6)


def test_heads_are_quantised_as_their_targets_are(tmp_path: Path) -> None:
    """Layers that choose experts to 8 bits, in every reading."""
    wide = {"hidden_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    model = hybrid_model("qwen3_5_moe", vocab_size=VOCAB, **wide)
    folder = write_head(tmp_path / "d", random_head(model))
    target = Target(model)
    drafter = DrafterFolder(folder, bits=4).bind(target, byte_tokenizer())
    assert isinstance(drafter, MtpDrafter)
    for each in (drafter, *drafter.readings().values()):
        layer = each.rows.network.layers[0]
        assert (layer.mlp.gate.bits, layer.mlp.switch_mlp.up_proj.bits) == (8, 4)
        decoder = Decoder(target.reading(each.features.layers), each, BeamShape(2, 3), GREEDY)
        said, _, _ = run(decoder, 8)
        assert said == plain_tokens(model, PROMPT, 8)


def test_what_no_file_states_are_readings(model: nn.Module, tmp_path: Path) -> None:
    """Where hidden states are read, and whether norms were stored without their 1."""
    tensors, target = random_head(model), Target(model)
    readings = load(write_head(tmp_path / "d", tensors), target).readings()
    assert readings.keys() == {"hidden states before the final norms", "norms without 1"}
    early = readings["hidden states before the final norms"]
    assert early.features.layers == (target.n_layers,)
    assert not early.features.hidden
    norm = parameters_of(readings["norms without 1"].rows.network)["norm.weight"]
    np.testing.assert_allclose(norm, tensors["norm.weight"] - 1, atol=1e-6)


def test_a_wrong_pair_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = hybrid_model("qwen3_5", vocab_size=VOCAB, hidden_size=48)
    folder = write_head(tmp_path / "d", random_head(wide))
    other = target_model()
    wrong_pair_is_refused_before_weights_are_read(load, folder, other, "48.*32", monkeypatch)


def test_a_target_without_such_layers_is_refused(model: nn.Module, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "d", random_head(model))
    with pytest.raises(UnsupportedModelError, match="mamba2"):
        load(folder, Target(hybrid_model("mamba2", vocab_size=VOCAB)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fc.weight": None}, r"fc\.weight"),
        ({"fc.weight": mx.zeros((HIDDEN, 40))}, r"fc\.weight.*40"),
        ({"layers.1.mlp.up_proj.weight": mx.zeros((2, 2))}, r"layers\.1\.mlp\.up_proj"),
        ({"norm.weight": mx.full((HIDDEN,), float("nan"))}, r"norm\.weight.*not finite"),
        ({"layers.0.self_attn.o_proj.scales": mx.ones((HIDDEN, 1))}, "o_proj.*quantised"),
    ],
    ids=str,
)
def test_damaged_files_name_the_tensor(
    changes: dict[str, mx.array | None], words: str, model: nn.Module, tmp_path: Path
) -> None:
    tensors = {**random_head(model), **changes}
    stored: Tensors = {name: array for name, array in tensors.items() if array is not None}
    with pytest.raises((DamagedFileError, UnsupportedModelError), match=words):
        load(write_head(tmp_path / "d", stored), Target(model))


@pytest.mark.parametrize(("name", "shape"), [("down_proj", None), ("gate_up_proj", (4, 63, 32))])
def test_damaged_experts_are_one_line(
    name: str, shape: tuple[int, ...] | None, tmp_path: Path
) -> None:
    model = target_model("qwen3_5_moe")
    stored = with_fused_experts(random_head(model))
    damaged = f"layers.0.mlp.experts.{name}"
    del stored[damaged]
    if shape is not None:
        stored[damaged] = mx.zeros(shape)
    with pytest.raises(DamagedFileError, match="experts") as caught:
        load(write_head(tmp_path / "d", stored), Target(model))
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def folder(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hub") / "tiny-qwen", model)


SHAPE = ("--beam-width", "2", "--beam-length", "3")


@pytest.mark.parametrize("more", [(), ("--temperature", "1", "--seed", "4")], ids=len)
def test_what_is_typed_says_what_plain_decoding_says(
    more: tuple[str, ...], folder: Path, model: nn.Module, tmp_path: Path,
    cli: CommandLine,
) -> None:  # fmt: skip
    plain = generated(cli, folder, "none", *more)
    sidecar = write_head(tmp_path / "head", without_ones(random_head(model)))
    for drafter in ("mtp", sidecar):
        drafted = generated(cli, folder, drafter, *more, *SHAPE)
        assert drafted["token_ids"] == plain["token_ids"]
        assert drafted["shapes"][0]["width"] == 2


def test_conversions_of_qwen3_next_may_hold_their_head(tmp_path: Path, cli: CommandLine) -> None:
    folder = write_model(tmp_path / "next", target_model("qwen3_next"))
    plain = generated(cli, folder, "none")
    assert generated(cli, folder, "mtp", *SHAPE)["token_ids"] == plain["token_ids"]


def test_answers_with_grammars_say_what_plain_ones_do(folder: Path) -> None:
    """By auto, which finds the head in the target's files; the others decode beside it."""
    redrafter = redrafter_mlx.load(folder, warm_up=False)
    assert "drafts with mtp" in str(redrafter.drafter_note)
    grammars_say_what_plain_answers_say(redrafter)


def test_a_target_that_brings_no_head_is_one_line(
    folder: Path, model: nn.Module, tmp_path: Path, cli: CommandLine
) -> None:
    bare = Path(shutil.copytree(folder, tmp_path / "bare"))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(bare / "model.safetensors"), weights, {"format": "mlx"})
    assert "mtp.*" in cli.error("generate", "--model", bare, "--drafter", "mtp", "-p", "Hi")


def test_of_the_original_repository_only_the_files_with_the_head_are_fetched(
    folder: Path, model: nn.Module, tmp_path: Path, hub: FakeHub,
    cli: CommandLine,
) -> None:  # fmt: skip
    """Where another tensor lies in the same file; the second time, nothing is asked."""
    head = {f"mtp.{name}": array for name, array in without_ones(random_head(model)).items()}
    mx.save_safetensors(str(tmp_path / "2"), head | {"model.norm.weight": mx.ones(HIDDEN)})
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    names = {"model.embed_tokens.weight": first, **dict.fromkeys(head, second)}
    hub.repos["org/original", "main"] = {
        "config.json": json.dumps(vars(model.args)).encode(),
        "model.safetensors.index.json": json.dumps({"weight_map": names}).encode(),
        first: b"large" * 1000,
        second: (tmp_path / "2.safetensors").read_bytes(),
    }
    plain = generated(cli, folder, "none")
    drafted = generated(cli, folder, "mtp:org/original", *SHAPE)
    assert drafted["token_ids"] == plain["token_ids"]
    assert any(second in asked for asked in hub.asked)
    assert not any(first in asked for asked in hub.asked)
    hub.asked.clear()
    generated(cli, folder, "mtp:org/original", "--offline", *SHAPE)
    assert hub.asked == []


def test_a_head_split_off_comes_from_the_hub(
    folder: Path, model: nn.Module, tmp_path: Path, hub: FakeHub,
    cli: CommandLine,
) -> None:  # fmt: skip
    """Though its configuration states as many layers as its target's."""
    head = write_head(tmp_path / "head", random_head(model))
    hub.repos["org/head", "main"] = {path.name: path.read_bytes() for path in head.iterdir()}
    plain = generated(cli, folder, "none")
    drafted = generated(cli, folder, "org/head", *SHAPE)
    assert drafted["token_ids"] == plain["token_ids"]
