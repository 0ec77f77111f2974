"""EAGLE's logits against those of other implementations, from the files that these write.

Run with `-m parity`. speculators (PyPI) and PyTorch must be installed; for the authors' own
modules, $EAGLE_REPOSITORY must name a checkout of github.com/SafeAILab/EAGLE.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from eagle_files import fresh, load, save, seen
from eagle_samples import HEADS, INNER, KV_HEADS, LAYERS, VOCAB
from random_weights import randomise
from tiny import HIDDEN, LLAMA3_ROPE, byte_model

from redrafter_mlx.drafting.files.export import export_drafter
from redrafter_mlx.target_model.model import Target

pytestmark = pytest.mark.parity

P = 9
"""Positions of the text; the root follows."""


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return byte_model(num_hidden_layers=LAYERS, tie_word_embeddings=False)


def compare(
    folder: Path,
    model: nn.Module,
    features: np.ndarray,
    tokens: list[int],
    levels: list[tuple[list[int], list[int], np.ndarray]],
) -> None:
    """Compare each level's logits [W, V'] after its parents and tokens, in float32.

    features: [P, C] of the text
    tokens:   P + 1, the root last
    """
    drafter = load(folder, Target(model))
    unread = np.zeros((P, HIDDEN * bool(drafter.config.layers)))
    features = np.concatenate([features, unread], axis=1)
    asked = drafter.levels(drafter.empty(1), seen(tokens, features, 0, P, P), len(levels))
    worst = 0.0
    for parents, new, want in levels:
        got = asked.following(mx.array([parents]), mx.array([new])) if parents else asked.first()
        worst = max(worst, np.abs(np.array(got[0]) - want).max() / want.std())
    print(f"{folder.parent.name}: {worst:.1e} of the logits' spread")
    assert worst < 1e-4


SPECULATORS = {
    "llama": {},
    "llama, normed residual, 3 layers": {"norm_before_residual": True, "num_hidden_layers": 3},
    "llama, EAGLE-3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "llama 3.1 rope": {"rope_parameters": {"rope_theta": 5e5, **LLAMA3_ROPE}},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "norm_before_fc": True},
    "qwen3, five layers read": {
        "model_type": "qwen3",
        "eagle_aux_hidden_state_layer_ids": [0, 2, 3, 5, 6],
        "draft_vocab_size": VOCAB,
    },
}


@pytest.mark.parametrize("changes", SPECULATORS.values(), ids=SPECULATORS)
@pytest.mark.parametrize("layout", ["layers", "midlayer"])
def test_speculators(
    layout: str, changes: dict[str, object], model: nn.Module, tmp_path: Path
) -> None:
    """Its own files, and the same tensors in the layout of the authors' training code."""
    pytest.importorskip("torch", reason="pip install torch")
    pytest.importorskip("speculators", reason="pip install speculators")
    given = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "vocab_size": VOCAB,
             "num_key_value_heads": KV_HEADS, "intermediate_size": INNER, "num_hidden_layers": 1,
             "model_type": "llama", "draft_vocab_size": 50} | changes  # fmt: skip
    if layout == "midlayer" and given["num_hidden_layers"] != 1:
        pytest.skip("that layout has one layer")
    theirs = speculators_model(given)
    folder = tmp_path / "drafter"
    theirs.save_pretrained(folder)
    if layout == "midlayer":
        rename_layers(folder)
    compare_with_speculators(theirs, folder, model)


def test_speculators_loads_what_is_trained_here(model: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="pip install torch")
    pytest.importorskip("speculators", reason="pip install speculators")
    eagle3 = importlib.import_module("speculators.models.eagle3")
    save(fresh(Target(model)), tmp_path / "trained")
    folder = tmp_path / "exported"
    export_drafter(tmp_path / "trained", folder, "speculators")
    config = eagle3.Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = eagle3.Eagle3DraftModel(config).eval()
    stored = importlib.import_module("safetensors.torch").load_file(folder / "model.safetensors")
    missing, unexpected = theirs.load_state_dict(stored, strict=False)
    assert unexpected == []
    assert set(missing) <= {
        "embed_tokens.weight",
        "verifier_norm.weight",
        "verifier_lm_head.weight",
    }
    compare_with_speculators(theirs.float(), folder, model)


def compare_with_speculators(theirs, folder: Path, model: nn.Module) -> None:  # type: ignore[no-untyped-def]
    """Compare its logits along a text with those of our drafter, loaded from its files."""
    torch = importlib.import_module("torch")
    rng = np.random.default_rng(0)
    text = rng.integers(0, VOCAB, P + 3).tolist()
    features = rng.normal(size=(P, theirs.fc.in_features)).astype(np.float32)
    embedding = torch.tensor(np.array(model.model.embed_tokens.weight))
    theirs.embed_tokens.weight.data = embedding
    seen_logits = []
    theirs.lm_head.register_forward_hook(lambda _, __, out: seen_logits.append(out))
    with torch.no_grad():
        # Later levels are teacher-forced: all rows but the last `level` are those of one text.
        padded = np.concatenate([features, rng.normal(size=(2, features.shape[1]))])
        theirs(
            hidden_states=torch.tensor(padded[None].astype(np.float32)),
            input_ids=torch.tensor([text[1:]]),
            document_ids=torch.zeros((1, P + 2), dtype=torch.long),
            ttt_steps=3,
        )
    logits = [out[0, P - 1 : P].numpy() for out in seen_logits]
    steps = [([], [], logits[0]), ([0], [text[-2]], logits[1]), ([0], [text[-1]], logits[2])]
    compare(folder, model, features, text[: P + 1], steps)


def speculators_model(given: dict[str, object]):  # type: ignore[no-untyped-def]
    """Return an Eagle3DraftModel with random weights."""
    torch = importlib.import_module("torch")
    speculators = importlib.import_module("speculators")
    eagle3 = importlib.import_module("speculators.models.eagle3")
    greedy = importlib.import_module("speculators.proposals.greedy")
    auto = importlib.import_module("transformers").AutoConfig
    own = {"draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
           "eagle_aux_hidden_state_layer_ids"}  # fmt: skip
    layer = auto.for_model(**{key: value for key, value in given.items() if key not in own})
    layer._attn_implementation = "eager"
    config = eagle3.Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        speculators_config=speculators.SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[greedy.GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=speculators.VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **{key: value for key, value in given.items() if key in own},
    )
    torch.manual_seed(0)
    model = eagle3.Eagle3DraftModel(config).float().eval()
    randomise(model)
    if model.use_draft_vocab:
        chosen = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
        model.d2t.copy_(chosen - torch.arange(len(chosen)))
        model.t2d[chosen] = True
    return model


def rename_layers(folder: Path) -> None:
    """Rewrite speculators' files in the authors' layout."""
    weights = folder / "model.safetensors"
    tensors = dict(mx.load(str(weights)))  # type: ignore[arg-type]
    mx.eval(tensors)
    renamed = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    mx.save_safetensors(str(weights), renamed)
    config = json.loads((folder / "config.json").read_text())
    layer = config.pop("transformer_layer_config")
    kept = {k: v for k, v in config.items() if "norm" in k or k.startswith(("eagle", "draft"))}
    theta = (layer.get("rope_parameters") or {}).get("rope_theta")
    layer = {k: v for k, v in layer.items() if k != "head_dim"} | {"rope_theta": theta}
    scaling = layer.pop("rope_parameters", None)
    layer["rope_scaling"] = scaling if scaling and scaling["rope_type"] == "llama3" else None
    (folder / "config.json").write_text(json.dumps(layer | kept))


def authors_modules(name: str) -> ModuleType:
    pytest.importorskip("torch", reason="pip install torch")
    checkout = os.environ.get("EAGLE_REPOSITORY")
    if not checkout:
        pytest.skip("set EAGLE_REPOSITORY to a checkout of github.com/SafeAILab/EAGLE")
    if checkout not in sys.path:
        sys.path.insert(0, checkout)
    return importlib.import_module(f"eagle.model.{name}")


AUTHORS = {
    "EAGLE-3": ("cnets", {"draft_vocab_size": 50, "bias": False}),
    "EAGLE-3, all tokens": ("cnets", {"draft_vocab_size": VOCAB, "bias": False}),
    "EAGLE-3, rope_theta": ("cnets", {"draft_vocab_size": 50, "rope_theta": 500000.0}),
    "EAGLE-1": ("cnets1", {}),
    "EAGLE-1 without bias": ("cnets1", {"bias": False, "rope_theta": 500000.0}),
    "EAGLE-1 for Qwen2": ("cnets1", {"bias": False, "qkv_bias": True}),
}


@pytest.mark.parametrize(("module", "changes"), AUTHORS.values(), ids=AUTHORS)
def test_the_authors_modules(
    module: str, changes: dict[str, object], model: nn.Module, tmp_path: Path
) -> None:
    """On a tree with branches, from a state written by torch.save."""
    authors = authors_modules(module)
    torch = importlib.import_module("torch")
    config = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "vocab_size": VOCAB,
              "num_key_value_heads": KV_HEADS, "intermediate_size": INNER, "num_hidden_layers": 1,
              "rms_norm_eps": 1e-5, "model_type": "llama", "pad_token_id": 0,
              **changes}  # fmt: skip
    torch.manual_seed(0)
    settings = importlib.import_module("eagle.model.configs").EConfig(**config)
    # Newer transformers rename these two.
    settings.rope_scaling, settings.pretraining_tp = None, 1
    if "rope_theta" in config:
        settings.rope_theta = config["rope_theta"]
    elif hasattr(settings, "rope_theta"):
        del settings.rope_theta
    theirs = authors.Model(settings, bias=bool(config.get("bias", True))).float().eval()
    randomise(theirs)
    theirs.embed_tokens.weight.data = torch.tensor(np.array(model.model.embed_tokens.weight))
    if hasattr(theirs, "d2t"):
        chosen = torch.randperm(VOCAB)[: settings.draft_vocab_size].sort().values
        theirs.d2t.copy_(chosen - torch.arange(len(chosen)))
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(theirs.state_dict(), folder / "pytorch_model.bin")

    three = module == "cnets"
    head = torch.tensor(np.array(model.lm_head.weight))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, P + 1).tolist()
    features = rng.normal(size=(P, HIDDEN * (3 if three else 1))).astype(np.float32)

    def logits(hidden):  # type: ignore[no-untyped-def]
        out = theirs.lm_head(theirs.norm(hidden)) if three else hidden @ head.T
        return out.numpy()

    drafts = ([0, 0, 0], [5, 60, 7]), ([2, 0, 2], [3, 3, 90])
    with torch.no_grad():
        theirs.reset()
        hidden, cache = theirs(
            torch.tensor(features[None]), torch.tensor([tokens[1:]]), use_cache=True
        )
        levels = [([], [], logits(hidden[0, -1:]))]
        context, mask = hidden[:, -1:], torch.zeros((1, 1, 1, 0))
        for depth, (parents, new) in enumerate(drafts):
            eye = torch.eye(3)[None, None]
            mask = torch.cat([mask[:, :, parents], eye], dim=3)
            theirs.tree_mask = mask
            hidden, cache = theirs(
                context[:, parents],
                torch.tensor([new]),
                past_key_values=cache,
                position_ids=torch.full((3,), P + depth),
                use_cache=True,
            )
            context = hidden
            levels.append((parents, new, logits(hidden[0])))
    compare(folder, model, features, tokens, levels)
