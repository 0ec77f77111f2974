"""Medusa heads and the MLP speculator against their authors' own code, on random weights.

Run with `-m parity`. PyTorch and ibm-fms (PyPI) must be installed, and $MEDUSA_REPOSITORY and
$FMS_EXTRAS_REPOSITORY must name checkouts of github.com/FasterDecoding/Medusa and
github.com/foundation-model-stack/fms-extras.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from medusa_files import AUTHORS
from mlp_speculator_files import config_of
from tiny import HIDDEN, VOCAB, random_model

from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.level_drafter import MemorylessDrafter
from redrafter_mlx.drafting.static_trees import find_tree
from redrafter_mlx.speculation.static_tree import static_tree
from redrafter_mlx.target_model.model import Target

pytestmark = pytest.mark.parity

HEADS = 5


def repository(variable: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Add the checkout named by an environment variable to sys.path, and return it."""
    pytest.importorskip("torch", reason="pip install torch==2.13.0")
    folder = os.environ.get(variable)
    if folder is None:
        pytest.skip(f"set {variable} to a checkout of the authors' repository")
    monkeypatch.syspath_prepend(folder)
    return Path(folder)


def loaded(folder: Path, target: Target) -> MemorylessDrafter:
    drafter = DrafterFolder(folder).bind(target, None)  # type: ignore[arg-type]
    assert isinstance(drafter, MemorylessDrafter)
    return drafter


def closest(got: mx.array, want: Any, what: str) -> None:
    """Assert that two arrays are equal within 1e-4, and print their largest difference."""
    difference = float(np.abs(np.array(got) - want.detach().numpy()).max())
    print(f"{what}: largest difference {difference:.1e}")
    assert difference < 1e-4


@pytest.fixture
def medusa(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The authors' modules, without those that need an older transformers."""
    folder = repository("MEDUSA_REPOSITORY", monkeypatch) / "medusa" / "model"
    for name, path in (("medusa", folder.parent), ("medusa.model", folder)):
        package = ModuleType(name)
        package.__path__ = [str(path)]
        monkeypatch.setitem(sys.modules, name, package)
    for name in ("modeling_llama_kv", "modeling_mistral_kv"):
        absent = ModuleType(f"medusa.model.{name}")
        absent.LlamaForCausalLM = absent.MistralForCausalLM = object  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, absent.__name__, absent)
    for name in ("utils", "kv_cache", "medusa_choices", "medusa_model", "medusa_model_legacy"):
        monkeypatch.delitem(sys.modules, f"medusa.model.{name}", raising=False)
    for name in ("medusa_model", "medusa_model_legacy"):
        module = importlib.import_module(f"medusa.model.{name}")
        tokenizers = SimpleNamespace(from_pretrained=lambda _: None)
        monkeypatch.setattr(module, "AutoTokenizer", tokenizers)
    return sys.modules["medusa.model"]


def with_heads(medusa: ModuleType, layers: int, own_outputs: bool) -> Any:
    """Return the authors' model with random heads; its target's hidden states are its inputs."""
    import torch

    torch.manual_seed(0)

    class Base(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config, self.dtype, self.device = config, torch.float32, "cpu"
            self.model = lambda input_ids, **_: (input_ids,)
            self.lm_head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)

    config = SimpleNamespace(
        medusa_num_heads=HEADS, medusa_num_layers=layers, _name_or_path="", hidden_size=HIDDEN,
        vocab_size=VOCAB,
    )  # fmt: skip
    if own_outputs:
        kind = type("Medusa", (medusa.medusa_model.MedusaModelABC, Base), {})
        model: Any = kind(config)
    else:
        model = medusa.medusa_model_legacy.MedusaModel(Base(config), HEADS, layers, "")
    for parameter in model.medusa_head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # blocks start as the identity
    return model


@pytest.mark.parametrize("pickled", [True, False], ids=["pt", "safetensors"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("own_outputs", [True, False], ids=["own outputs", "the target's"])
def test_medusa_heads_give_the_authors_logits(
    medusa: ModuleType, tmp_path: Path, own_outputs: bool, layers: int, pickled: bool
) -> None:
    import torch
    from safetensors.torch import save_file

    theirs = with_heads(medusa, layers, own_outputs)
    state = theirs.medusa_head.state_dict()
    if pickled:
        torch.save(state, tmp_path / "medusa_lm_head.pt")
    else:
        copies = {name: array.clone() for name, array in state.items()}  # layers share one module
        save_file(copies, tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**AUTHORS, "medusa_num_layers": layers}))
    model = random_model("llama (mistral-style)")
    if not own_outputs:
        head = theirs.base_model.lm_head.weight.detach().numpy()
        model.lm_head.weight = mx.array(head)
    hidden = np.random.default_rng(0).normal(size=(2, HIDDEN)).astype(np.float32)
    flags = {"medusa_forward": True} if own_outputs else {}
    want = theirs(torch.tensor(hidden[:, None]), **flags)  # [heads, B, 1, V]
    levels = loaded(tmp_path, Target(model)).levels_of(mx.array(hidden), mx.array([1, 2]), HEADS)
    closest(levels.first(), want[0], "head 0")
    for k in range(1, HEADS):
        got = levels.following(mx.zeros((2, 1), mx.int32), mx.array([[7], [8]]))
        closest(got, want[k], f"head {k}")


@pytest.mark.parametrize("name", ["mc_sim_7b_63", "vicuna_7b_stage2", "zephyr_stage2"])
def test_a_static_tree_holds_the_authors_candidates(
    medusa: ModuleType, tmp_path: Path, name: str
) -> None:
    import torch

    theirs = with_heads(medusa, 1, own_outputs=True)
    torch.save(theirs.medusa_head.state_dict(), tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text(json.dumps(AUTHORS))
    hidden = np.random.default_rng(1).normal(size=(1, HIDDEN)).astype(np.float32)
    logits = theirs.lm_head(torch.tensor(hidden[:, None]))
    heads = theirs(torch.tensor(hidden[:, None]), medusa_forward=True)
    utils, choices = medusa.utils, getattr(medusa.medusa_choices, name)
    buffers = utils.generate_medusa_buffers(choices, device="cpu")
    _, want = utils.generate_candidates(
        heads, logits, buffers["tree_indices"], buffers["retrieve_indices"]
    )
    tree, root = find_tree(f"medusa_{name}"), mx.array([int(want[0, 0])])
    assert sorted(tree.paths) == sorted(map(tuple, choices))
    levels = loaded(tmp_path, Target(random_model())).levels_of(mx.array(hidden), root, tree.depth)
    beams = static_tree(levels, root, tree)
    got = [int(root.item())]  # both are ordered by length, then by ranks
    for depth in range(1, tree.depth + 1):
        got += beams.tokens[0, : len(tree.level(depth)), depth].tolist()
    assert got == want[0].tolist()


@pytest.mark.parametrize("inner", [0, 24])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("prefix", ["", "speculator."])
def test_the_mlp_speculator_gives_the_authors_logits(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    prefix: str,
    scaled: bool,
    tied: bool,
    inner: int,
) -> None:
    repository("FMS_EXTRAS_REPOSITORY", monkeypatch)
    serialization = pytest.importorskip("fms.utils.serialization", reason="pip install ibm-fms")
    import torch
    from safetensors.torch import save_model

    monkeypatch.setattr(serialization, "register_adapter", lambda *_: None)  # for an older ibm-fms
    speculator = importlib.import_module("fms_extras.models.speculator")
    torch.manual_seed(0)
    theirs = speculator.MLPSpeculator(HIDDEN, inner, VOCAB, HEADS, tied, scaled)
    theirs.reset_parameters()
    for norm in theirs.ln:
        torch.nn.init.normal_(norm.weight, mean=1, std=0.2)
        torch.nn.init.normal_(norm.bias, std=0.2)
    if prefix:  # transformers' format, with tied weights stored once
        whole = torch.nn.Module()
        whole.speculator = theirs
        save_model(whole, str(tmp_path / "model.safetensors"))
    else:
        torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    sizes = {"inner_dim": inner, "tie_weights": tied, "scale_input": scaled, "n_predict": HEADS}
    (tmp_path / "config.json").write_text(json.dumps(config_of(**sizes)))
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(2, HIDDEN)).astype(np.float32)
    path = rng.integers(0, VOCAB, size=(2, HEADS))
    want = theirs(torch.tensor(hidden[:, None]), torch.tensor(path))  # [heads, B, 1, V]
    drafter = loaded(tmp_path, Target(random_model()))
    levels = drafter.levels_of(mx.array(hidden), mx.array(path[:, 0]), HEADS)
    closest(levels.first(), want[0], "level 1")
    for i in range(1, HEADS):
        got = levels.following(mx.zeros((2, 1), mx.int32), mx.array(path[:, i : i + 1]))
        closest(got, want[i], f"level {i + 1}")
