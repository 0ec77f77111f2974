"""Block drafters' logits against those of other implementations, on random weights.

Run with `-m parity`. Each comparison is skipped whose package is missing: dflash, which is the
authors' own, mlx-dspark, mlx-vlm, and speculators with PyTorch (PyPI).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from block_samples import SAMPLES, Sample, load, random_tensors, write_files
from eagle_files import seen
from eagle_samples import HEADS, INNER, KV_HEADS, LAYERS, VOCAB
from random_weights import randomise
from tiny import HIDDEN, byte_model

from redrafter_mlx.target_model.model import Target

pytestmark = pytest.mark.parity

P = 11
"""Positions of the text; the root follows."""


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return byte_model(num_hidden_layers=LAYERS, tie_word_embeddings=False)


def compare(
    folder: Path,
    model: nn.Module,
    text: np.ndarray,
    features: Any,
    want: Any,
    path: Sequence[int] = (0,) * 9,
) -> None:
    """Compare the logits [drafts, V'] after a text, its root and the drafts of a path.

    The text is read in two pieces.
    """
    drafter = load(folder, Target(model))
    padded = np.concatenate([features, np.zeros((P, HIDDEN))], axis=1)
    memory = drafter.extend(drafter.empty(1), seen(text.tolist(), padded, 0, 7, 7))
    drafts = len(want)
    assert drafts == drafter.config.drafts
    levels = drafter.levels(memory, seen(text.tolist(), padded, 7, P - 7, P - 7), drafts)
    got_levels = [levels.first()]
    for token in path[: drafts - 1]:
        got_levels.append(levels.following(mx.array([[0]]), mx.array([[token]])))
    got = np.array(mx.concatenate(got_levels, axis=1)[0])
    finite = np.isfinite(want)
    assert (np.isfinite(got) == finite).all()
    worst = np.abs(got[finite] - want[finite]).max() / want[finite].std()
    print(f"{worst:.1e} of the logits' spread")
    assert worst < 1e-4


def random_text(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(P, sample.features * HIDDEN)).astype(np.float32)
    return rng.integers(0, VOCAB, P + 1), features


OF_AUTHORS = [
    name
    for name, sample in SAMPLES.items()
    if "specul" not in name and "follow" not in name and sample.markov is None
    if not sample.candidates
]


@pytest.mark.parametrize("name", OF_AUTHORS)
@pytest.mark.parametrize("package", ["dflash", "mlx_vlm"])
def test_mlx_implementations(package: str, name: str, model: nn.Module, tmp_path: Path) -> None:
    sample = SAMPLES[name]
    if package == "mlx_vlm" and name in ("DFlash, in windows", "DFlash, scaled and capped"):
        pytest.skip("it has windows of another kind, and no factors")
    tensors = random_tensors(sample)
    folder = write_files(tmp_path / "d", sample, tensors)
    read = read_with_dflash if package == "dflash" else read_with_mlx_vlm
    theirs = read(folder)
    theirs.load_weights([(name, mx.array(t, mx.float32)) for name, t in tensors.items()])
    theirs.bind(model)
    text, features = random_text(sample)
    block = mx.array([[int(text[P]), *[250] * (sample.rows - 1)]])
    cache = theirs.make_cache()
    theirs(block, mx.array(features[None, :5]), cache)
    logits = theirs(block, mx.array(features[None, 5:]), cache)
    compare(folder, model, text, features, np.array(logits[0, sample.first_row :]))


def read_with_dflash(folder: Path) -> Any:
    theirs = pytest.importorskip("dflash.model_mlx", reason="pip install --no-deps dflash")
    given = json.loads((folder / "config.json").read_text())
    nested = given.pop("dflash_config")
    causal = nested.pop("causal_head", nested.pop("causal", None))
    known = theirs.DFlashConfig.__dataclass_fields__
    given |= nested | {"is_causal": causal}
    config = {key: value for key, value in given.items() if key in known}
    return theirs.DFlashDraftModel(theirs.DFlashConfig(**config))


def read_with_mlx_vlm(folder: Path) -> Any:
    module = "mlx_vlm.speculative.drafters.qwen3_dflash"
    theirs = pytest.importorskip(f"{module}.dflash", reason="pip install --no-deps mlx-vlm")
    given = json.loads((folder / "config.json").read_text())
    nested = given["dflash_config"]
    if "causal_head" in nested:
        nested["causal"] = nested.pop("causal_head")
    config = importlib.import_module(f"{module}.config").DFlashConfig.from_dict(given)
    return theirs.DFlashDraftModel(config)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sample_from_anchor": True},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "non_causal": True},
    ],
    ids=str,
)
def test_speculators(changes: dict[str, Any], model: nn.Module, tmp_path: Path) -> None:
    """From the files that it writes."""
    pytest.importorskip("torch", reason="pip install torch")
    pytest.importorskip("speculators", reason="pip install speculators")
    theirs = speculators_model("dflash", "DFlash", dict(changes))
    theirs.save_pretrained(tmp_path / "d")
    text, features = random_text(Sample(features=3))
    logits = blocks_of(theirs, model, text, features)[1]
    first = 0 if changes.get("sample_from_anchor") else 1
    compare(tmp_path / "d", model, text, features, logits[0, first:].numpy())


def speculators_model(form: str, name: str, given: dict[str, Any], **more: Any) -> Any:
    """Return a model of `speculators` with random weights; `more` are keys of its own form."""
    torch = importlib.import_module("torch")
    speculators = importlib.import_module("speculators")
    module = importlib.import_module(f"speculators.models.{form}")
    greedy = importlib.import_module("speculators.proposals.greedy")
    auto = importlib.import_module("transformers").AutoConfig
    outputs = VOCAB if form == "dflash2" else 50
    anchor = given.pop("sample_from_anchor", form == "dspark")
    non_causal = given.pop("non_causal", False)
    layers = auto.for_model(
        "qwen3", hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, head_dim=8,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, vocab_size=VOCAB,
        use_sliding_window="layer_types" in given, **given,
    )  # fmt: skip
    layers._attn_implementation = "eager"
    config = getattr(module, f"{name}SpeculatorConfig")(
        transformer_layer_config=layers, draft_vocab_size=outputs, block_size=6, mask_token_id=250,
        aux_hidden_state_layer_ids=[2, 4, 5], sample_from_anchor=anchor,
        sliding_window_non_causal=non_causal,
        speculators_config=speculators.SpeculatorsConfig(
            algorithm=form,
            proposal_methods=[
                greedy.GreedyTokenProposalConfig(speculative_tokens=6 if anchor else 5)
            ],
            default_proposal_method="greedy",
            verifier=speculators.VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **more,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = getattr(module, f"{name}DraftModel")(config).float().eval()
    randomise(theirs)
    if not theirs.use_draft_vocab:
        return theirs
    chosen = torch.randperm(VOCAB)[:50].sort().values
    theirs.d2t.copy_(chosen - torch.arange(50))
    theirs.t2d[chosen] = True
    return theirs


def blocks_of(theirs: Any, model: nn.Module, text: np.ndarray, features: np.ndarray) -> Any:
    """Return the rows [1, 6, H] and logits [1, 6, V'] of the block after the text."""
    torch = importlib.import_module("torch")
    theirs.embed_tokens.weight.data = torch.tensor(np.array(model.model.embed_tokens.weight))
    if not theirs.use_draft_vocab:
        theirs.lm_head.weight.data = torch.tensor(np.array(model.lm_head.weight))
    unused = np.zeros((9, features.shape[1]), np.float32)
    hidden = torch.tensor(np.concatenate([features, unused])[None])
    ids = torch.tensor([[*text.tolist(), *[0] * 8]])
    anchors = torch.zeros((1, P + 9), dtype=torch.bool)
    anchors[0, P] = True
    with torch.no_grad():
        return theirs._backbone_forward(
            hidden, ids, anchors, torch.zeros((1, P + 9, HIDDEN)),
            torch.zeros((1, P + 9), dtype=torch.long), max_anchors=1,
        )  # fmt: skip


PATH = [7, 201, 33, 90, 5]
"""Drafts, each of which corrects the distribution of the next."""


@pytest.mark.parametrize("name", ["DSpark, DeepSpec", "DSpark, SpecForge"])
def test_mlx_dspark(name: str, model: nn.Module, tmp_path: Path) -> None:
    theirs = pytest.importorskip("mlx_dspark.model", reason="pip install --no-deps mlx-dspark")
    config = importlib.import_module("mlx_dspark.config").DSparkConfig
    sample = SAMPLES[name]
    tensors = random_tensors(sample)
    tensors["embed_tokens.weight"] = np.array(model.model.embed_tokens.weight, np.float64)
    tensors["lm_head.weight"] = np.array(model.lm_head.weight, np.float64)
    folder = write_files(tmp_path / "d", sample, tensors)
    drafter = theirs.DSparkDrafter(config.from_json(folder / "config.json"))
    drafter.load_weights([(name, mx.array(t, mx.float32)) for name, t in tensors.items()])
    text, features = random_text(sample)
    caches = drafter.make_ctx_cache()
    drafter.update_context(mx.array(features[None]), 0, caches)
    block = mx.array([[int(text[P]), *[250] * (sample.rows - 1)]])
    logits = drafter.compute_logits(drafter.backbone(drafter.embed(block), P, caches))
    before = mx.array([int(text[P]), *PATH])
    corrected = logits[0] + drafter.markov_head.step_bias(before)
    compare(folder, model, text, features, np.array(corrected), PATH)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_dspark_of_speculators(kind: str, model: nn.Module, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="pip install torch")
    pytest.importorskip("speculators", reason="pip install speculators")
    theirs = speculators_model("dspark", "DSpark", {}, markov_rank=12, markov_head_type=kind)
    theirs.save_pretrained(tmp_path / "d")
    text, features = random_text(Sample(features=3))
    hidden, logits = blocks_of(theirs, model, text, features)[:2]
    with torch.no_grad():
        before = torch.tensor([[int(text[P]), *PATH]])
        bias = theirs.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
    compare(tmp_path / "d", model, text, features, (logits + bias)[0].numpy(), PATH)


def test_dflash2_of_speculators(model: nn.Module, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="pip install torch")
    pytest.importorskip("speculators", reason="pip install speculators")
    theirs = speculators_model(
        "dflash2", "DFlash2", {}, conv_group_size=8, selector_rank=12, selector_top_k=7
    )
    theirs.save_pretrained(tmp_path / "d")
    text, features = random_text(Sample(features=3))
    hidden, logits = blocks_of(theirs, model, text, features)[:2]
    with torch.no_grad():
        before = torch.tensor([[int(text[P]), *PATH[:-1]]])
        found = theirs.candidate_selector.select(logits[:, 1:], hidden[:, 1:], before)
    want = np.full((5, VOCAB), -np.inf, np.float32)
    np.put_along_axis(want, found[0][0].numpy(), found[1][0].numpy(), axis=1)
    compare(tmp_path / "d", model, text, features, want, PATH)
