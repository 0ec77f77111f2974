"""Drafters exported for other servers: names, shapes, keys and values, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from command_line import CommandLine
from eagle_files import fresh
from mlx.utils import tree_flatten
from tiny import HIDDEN, VOCAB, byte_model, load_drafter, random_drafter, random_model

from redrafter_mlx.cli import main
from redrafter_mlx.drafting.files.drafter_files import open_files, parameters_of
from redrafter_mlx.drafting.files.export import ExportFormat, export_drafter
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.published.heads.medusa import MedusaConfig, MedusaNetwork, save_medusa
from redrafter_mlx.drafting.published.heads.mlp_speculator import (
    SpeculatorConfig,
    SpeculatorNetwork,
    save_speculator,
)
from redrafter_mlx.drafting.recurrent import save_drafter
from redrafter_mlx.errors import BadInputError, DamagedFileError, RedrafterError
from redrafter_mlx.target_model.model import Target

HEADS = 3


def medusa(folder: Path, tokens: int = VOCAB, outputs: str = "own") -> Path:
    config = MedusaConfig(HIDDEN, VOCAB, HEADS, 1, True, outputs, tokens)  # type: ignore[arg-type]
    save_medusa(MedusaNetwork(config), folder, {"target": "org/base", "target_fingerprint": "x"})
    return folder


def recurrent(folder: Path, **changes: object) -> Path:
    save_drafter(random_drafter(**changes), folder)
    return folder


def read(folder: Path) -> tuple[dict[str, mx.array], dict[str, object]]:
    files = open_files(folder)
    return files.tensors.read(), json.loads((folder / "config.json").read_text())


def converter_reads(config: dict[str, object]) -> set[str]:
    """Return the tensors that TensorRT-LLM reads: hf_drafter in its convert_checkpoint.py."""
    layers = config["num_draft_layers"]
    assert isinstance(layers, int)
    names = {f"lm_head.{layers}.weight"}
    for layer in range(layers):
        names |= {f"lm_head.{layer}.linear.weight", f"lm_head.{layer}.linear.bias"}
    if config["exit_dim"] != 2 * HIDDEN:
        names |= {"input_proj.weight", "input_proj.bias"}
    if config["rnn"]:
        names |= {"rnn_u.weight", "rnn_u.bias", "rnn_w.weight"}
    return names


@pytest.mark.parametrize("changes", [{}, {"exit_dim": 2 * HIDDEN}, {"rnn": False}])
def test_trtllms_converter_finds_every_tensor(changes: dict[str, object], tmp_path: Path) -> None:
    given = recurrent(tmp_path / "given", target="org/base", draft_length=3, **changes)
    export_drafter(given, tmp_path / "out", "trtllm")
    tensors, config = read(tmp_path / "out")
    assert tensors.keys() == converter_reads(config)
    assert config.keys() == {
        "model_type", "hidden_size", "vocab_size", "exit_dim", "num_draft_layers", "rnn",
        "num_lookback_tokens",
    }  # fmt: skip
    assert all(array.dtype == mx.float16 for array in tensors.values())
    again = load_drafter(tmp_path / "out", Target(random_model()))
    for name, array in parameters_of(load_drafter(given, Target(random_model()))).items():
        assert mx.allclose(parameters_of(again)[name], array, atol=1e-3), name


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"context_layers": [1]}, "context_layers"),
        ({"head": "tied"}, "head"),
        ({"draft_vocab_size": 50}, "draft_vocab_size"),
        ({"first_state": "embedding"}, "first_state"),
    ],
)
def test_trtllm_refuses_each_extension_by_name(
    changes: dict[str, object], named: str, tmp_path: Path
) -> None:
    given = recurrent(tmp_path / "given", **changes)
    with pytest.raises(RedrafterError, match=named):
        export_drafter(given, tmp_path / "out", "trtllm")
    assert not (tmp_path / "out").exists()


def test_what_float16_cannot_hold_is_not_written(tmp_path: Path) -> None:
    given = recurrent(tmp_path / "given")
    tensors, _ = read(given)
    name = next(iter(tensors))
    changed = {**tensors, name: mx.full(tensors[name].shape, 1e6)}
    mx.save_safetensors(str(given / "model.safetensors"), changed)
    with pytest.raises(DamagedFileError, match="not finite in float16"):
        export_drafter(given, tmp_path / "out", "trtllm")
    assert not (tmp_path / "out").exists()


def test_trtllm_gets_no_tensors_but_those_of_the_configuration(tmp_path: Path) -> None:
    given = recurrent(tmp_path / "given")
    tensors, _ = read(given)
    mx.save_safetensors(str(given / "model.safetensors"), dict([*tensors.items()][1:]))
    with pytest.raises(DamagedFileError, match="lacks tensor"):
        export_drafter(given, tmp_path / "out", "trtllm")


def test_medusa_heads_get_the_authors_names(tmp_path: Path) -> None:
    export_drafter(medusa(tmp_path / "given"), tmp_path / "out", "medusa")
    tensors, config = read(tmp_path / "out")
    assert (tmp_path / "out" / "medusa_lm_head.safetensors").exists()
    assert {name: array.shape for name, array in tensors.items()} == {
        f"{head}.{name}": shape
        for head in range(HEADS)
        for name, shape in (
            ("0.linear.weight", (HIDDEN, HIDDEN)),
            ("0.linear.bias", (HIDDEN,)),
            ("1.weight", (VOCAB, HIDDEN)),
        )
    }
    assert config == {
        "medusa_num_heads": HEADS, "medusa_num_layers": 1, "base_model_name_or_path": "org/base"
    }  # fmt: skip


def test_a_folder_counts_as_empty_if_it_holds_hidden_files_alone(tmp_path: Path) -> None:
    """Finder leaves a .DS_Store in every folder that it has shown."""
    given, out = medusa(tmp_path / "given"), tmp_path / "out"
    out.mkdir()
    (out / ".DS_Store").write_text("Finder's")
    export_drafter(given, out, "medusa")
    with pytest.raises(BadInputError, match="--output"):
        export_drafter(given, out, "medusa")


def test_medusa_refuses_heads_of_some_tokens(tmp_path: Path) -> None:
    with pytest.raises(RedrafterError, match="draft_vocab"):
        export_drafter(medusa(tmp_path / "given", tokens=50), tmp_path / "out", "medusa")


def test_medusa_refuses_what_is_of_none_of_its_heads(tmp_path: Path) -> None:
    given = medusa(tmp_path / "given")
    tensors = mx.load(str(given / "model.safetensors"))
    mx.save_safetensors(str(given / "model.safetensors"), {**tensors, "scale": mx.ones(2)})
    with pytest.raises(RedrafterError, match="holds scale, which is of none of its heads"):
        export_drafter(given, tmp_path / "out", "medusa")


def test_eagle_for_speculators_keeps_its_tensors_and_loses_our_records(tmp_path: Path) -> None:
    model = byte_model(num_hidden_layers=3, tie_word_embeddings=False)
    student = fresh(Target(model))
    student.recipe.save(student, tmp_path / "given")
    export_drafter(tmp_path / "given", tmp_path / "out", "speculators")
    (given, record), (out, config) = read(tmp_path / "given"), read(tmp_path / "out")
    assert {k: a.tolist() for k, a in out.items()} == {k: a.tolist() for k, a in given.items()}
    assert config == {k: v for k, v in record.items() if k not in ("target", "target_fingerprint")}
    assert config["speculators_model_type"] == "eagle3"
    assert DrafterFolder(tmp_path / "out").load(Target(model)).name == "EAGLE-3"


def test_mlp_speculators_keep_vllms_layout(tmp_path: Path) -> None:
    network = SpeculatorNetwork(SpeculatorConfig(HIDDEN, 24, VOCAB, HEADS, True, True))
    save_speculator(network, tmp_path / "given", {"target": "org/base"})
    export_drafter(tmp_path / "given", tmp_path / "out", "speculators")
    tensors, config = read(tmp_path / "out")
    assert tensors.keys() == {f"speculator.{n}" for n, _ in tree_flatten(network.parameters())}
    assert config["model_type"] == "mlp_speculator"
    assert "target" not in config


@pytest.mark.parametrize("form", ["speculators", "trtllm"])
def test_a_form_without_such_a_home_is_refused(form: ExportFormat, tmp_path: Path) -> None:
    with pytest.raises(RedrafterError, match="Medusa"):
        export_drafter(medusa(tmp_path / "given"), tmp_path / "out", form)


def test_the_command_writes_beside_the_drafter_once(tmp_path: Path, cli: CommandLine) -> None:
    line = ["export", str(recurrent(tmp_path / "given")), "--format", "trtllm"]
    assert cli.out(*line).strip() == str(tmp_path / "given-trtllm")
    assert str(tmp_path / "given-trtllm") in cli.error(*line)
    assert main.run(["export", str(tmp_path / "none"), "--format", "trtllm"]) == 1
    assert "onnx" in cli.error(*line[:3], "onnx")


def test_the_folder_may_be_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.chdir(recurrent(tmp_path / "given"))
    assert cli.out("export", ".", "--format", "trtllm").strip() == str(tmp_path / "given-trtllm")
