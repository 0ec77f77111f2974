"""Published drafter files: which weight files are read, and what kind their config states."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import save_model
from tiny import random_drafter, random_model
from torch_files import write_torch_file

from redrafter_mlx.drafting.files.drafter_files import DrafterFiles, fill, open_files
from redrafter_mlx.drafting.files.forms import DrafterFolder, find_form
from redrafter_mlx.drafting.files.recognition import holds_drafter
from redrafter_mlx.drafting.recurrent import save_drafter
from redrafter_mlx.errors import BadInputError, DamagedFileError, UnsupportedModelError
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.fetching.hub import is_drafter_config
from redrafter_mlx.weights.files.tensors import StoredTensors, open_tensors


def write(folder: Path, name: str, **tensors: tuple[int, ...]) -> None:
    """Write a file of zeros of these shapes."""
    mx.save_safetensors(str(folder / name), {n: mx.zeros(shape) for n, shape in tensors.items()})


def files_of(folder: Path, bits: int | None = None, **config: object) -> DrafterFiles:
    return DrafterFiles(folder, config, StoredTensors(folder / "weights", (), {}), bits)


def test_shards_of_an_index_are_read_as_one(tmp_path: Path) -> None:
    write(tmp_path, "model-1.safetensors", a=(2, 3))
    write(tmp_path, "model-2.safetensors", b=(4,))
    write(tmp_path, "other.safetensors", c=(5,))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    stored = open_tensors(tmp_path)
    assert stored.shapes == {"a": (2, 3), "b": (4,)}
    assert {name: array.shape for name, array in stored.read().items()} == stored.shapes
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(DamagedFileError, match=r"model-2\.safetensors is missing"):
        open_tensors(tmp_path)


def test_any_safetensors_are_read_and_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError, match=r"model\.safetensors is missing"):
        open_tensors(tmp_path)
    write(tmp_path, "heads.safetensors", a=(2, 3))
    assert open_tensors(tmp_path).path == tmp_path / "heads.safetensors"
    write(tmp_path, "more.safetensors", a=(2, 3))
    with pytest.raises(DamagedFileError, match=r"more\.safetensors holds tensor a, which another"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    "places",
    [
        {"a": {"shape": [2, 2**40], "data_offsets": [0, 16]}},
        {"a": {"shape": [4], "data_offsets": [-16, 0]}},
        {"a": {"shape": [4], "data_offsets": [0]}},
        {"a": {"shape": [8], "data_offsets": [0, 32]}},
        {name: {"shape": [4], "data_offsets": [0, 16]} for name in "ab"},
    ],
)
def test_a_safetensors_header_that_lies_is_refused(
    tmp_path: Path, places: dict[str, dict[str, object]]
) -> None:
    header = json.dumps({n: {"dtype": "F32", **place} for n, place in places.items()}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(16)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(DamagedFileError, match=r"model\.safetensors is truncated or no") as caught:
        open_tensors(tmp_path)
    assert len(str(caught.value)) < len(str(tmp_path)) + 250


@pytest.mark.parametrize("value", [None, "4", 4.0, True, 0, 2**40, [4]])
def test_a_config_value_of_a_wrong_kind_names_the_key(tmp_path: Path, value: object) -> None:
    files = files_of(tmp_path, heads=value)
    with pytest.raises(DamagedFileError, match=r"config\.json: heads is .* integer from 1 to"):
        files.integer("heads")


def test_missing_keys_take_their_defaults(tmp_path: Path) -> None:
    files = files_of(tmp_path, bias=None, eps=1)
    assert files.integer("heads", 4) == 4
    assert files.flag("bias", True)
    assert files.number("eps") == 1.0
    for wrong in (0, -1e-6, float("nan"), 10**400, "1"):
        with pytest.raises(DamagedFileError, match=r"eps is .*; it must be a number"):
            files_of(tmp_path, eps=wrong).number("eps")
    with pytest.raises(DamagedFileError, match="heads is missing"):
        files.integer("heads")
    with pytest.raises(DamagedFileError, match="eps is 1; it must be true or false"):
        files.flag("eps", False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": None}, r"weights lacks tensor weight of shape \[4, 64\]"),
        ({"weight": mx.zeros((4, 3))}, r"weight has shape \[4, 3\].*asks for \[4, 64\]"),
        ({"more": mx.zeros(1)}, "weights holds tensor more"),
        ({"weight": mx.zeros((4, 64), mx.int32)}, "weight holds int32"),
        ({"weight": mx.full((4, 64), 1e6)}, "weight holds values that are not finite in float16"),
    ],
)
def test_a_network_takes_all_of_its_tensors_and_no_others(
    tmp_path: Path, change: dict[str, mx.array | None], message: str
) -> None:
    tensors = {"weight": mx.zeros((4, 64)), **change}
    given = {name: array for name, array in tensors.items() if array is not None}
    with pytest.raises(DamagedFileError, match=message):
        fill(nn.Linear(64, 4, bias=False), given, files_of(tmp_path), mx.float16)


def test_a_drafter_in_pytorchs_format_is_the_same_as_in_safetensors(tmp_path: Path) -> None:
    drafter = random_drafter()
    save_drafter(drafter, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write_torch_file(tmp_path / "pytorch_model.bin", dict(tree_flatten(drafter.parameters())))
    module = DrafterFolder(tmp_path).bind(Target(random_model()), None).module  # type: ignore[arg-type]
    assert module is not None
    stored = dict(tree_flatten(drafter.parameters()))
    assert all(mx.array_equal(a, stored[n]) for n, a in tree_flatten(module.parameters()))


def test_drafter_bits_quantise_a_network_once_it_is_filled(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(64, 4, bias=False))
    weight = mx.random.normal((4, 64))
    fill(network, {"layers.0.weight": weight}, files_of(tmp_path, bits=8), mx.float32)
    assert isinstance(network.layers[0], nn.QuantizedLinear)
    x = mx.random.normal((64,))
    assert mx.allclose(network(x), weight @ x, atol=0.2)
    with pytest.raises(BadInputError, match="drafter_bits is 8, but no layer"):
        fill(nn.Linear(3, 4), {"weight": mx.zeros((4, 3)), "bias": mx.zeros(4)},
             files_of(tmp_path, bits=8), mx.float32)  # fmt: skip


UNSUPPORTED = {
    "P-EAGLE": (
        {"speculators_model_type": "peagle"},
        {"layers.0.hidden_norm.weight": (4,), "fc.weight": (4, 12)},
    ),
    "Hydra": ({"hydra_num_heads": 4}, {"0.0.linear.weight": (4, 8)}),
    "Kangaroo": (
        {"model_type": "llama", "num_hidden_layers": 1},
        {"layers.0.self_attn.q_proj.weight": (4, 4), "norm.weight": (4,)}),
}  # fmt: skip


@pytest.mark.parametrize("form", UNSUPPORTED)
def test_a_form_that_is_not_supported_is_refused_by_name(tmp_path: Path, form: str) -> None:
    config, shapes = UNSUPPORTED[form]
    (tmp_path / "config.json").write_text(json.dumps(config))
    write(tmp_path, "model.safetensors", **shapes)
    assert holds_drafter(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"a {form} drafter.*supported are ReDrafter"):
        find_form(open_files(tmp_path))


@pytest.mark.parametrize("tensor", ["fc.scales", "midlayer.self_attn.q_proj.weight_scale"])
def test_a_quantised_drafter_is_refused_as_such(tmp_path: Path, tensor: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
    shapes = {"midlayer.hidden_norm.weight": (4,), "fc.weight": (4, 2), tensor: (4, 1)}
    write(tmp_path, "model.safetensors", **shapes)
    assert holds_drafter(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"quantised already.*{tensor}.*--drafter-bits"):
        find_form(open_files(tmp_path))


def test_heads_in_a_quantised_model_are_not_quantised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization": {"bits": 4}}))
    shapes = {"medusa_head.0.0.linear.weight": (4, 4), "model.embed_tokens.scales": (4, 1)}
    write(tmp_path, "model.safetensors", **shapes)
    assert find_form(open_files(tmp_path)).name == "Medusa"


def test_what_is_no_drafter_says_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    write(tmp_path, "model.safetensors", **{"model.embed_tokens.weight": (4, 4)})
    assert not holds_drafter(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"model\.embed_tokens\.weight"):
        find_form(open_files(tmp_path))


@pytest.mark.parametrize("key", ["num_hidden_layers", "text_config"])
def test_a_language_model_is_no_drafter(key: str, tmp_path: Path) -> None:
    """Models that also read pictures describe their language model in `text_config`."""
    save_model(tmp_path, random_model())
    (tmp_path / "config.json").write_text(json.dumps({key: {}}))
    assert not holds_drafter(tmp_path)


def test_a_drafters_config_may_state_the_layers_of_its_target(tmp_path: Path) -> None:
    described = {"num_hidden_layers": 40}
    for config, found in ((described, False), (described | {"draft_vocab_size": 9}, True)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert is_drafter_config(tmp_path / "config.json") == found
