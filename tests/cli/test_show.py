"""`list`, `show` and `drafters`: what they tell of models, and that they tell it without MLX."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from command_line import CommandLine
from hybrids import HYBRIDS, hybrid_model
from tiny import HIDDEN, VOCAB
from weights_samples import (
    F32,
    IQ2_S,
    Q4_1,
    gguf_metadata,
    gguf_tensors,
    llama_model,
    write_folder,
    write_gguf,
)

from redrafter_mlx.drafting.published.heads.medusa import MedusaConfig, MedusaNetwork, save_medusa
from redrafter_mlx.loading.target import load_target
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.fit.machine import planned_machine, this_machine
from redrafter_mlx.weights.fit.states import state_bytes
from redrafter_mlx.weights.registry import DEFAULT_MODEL, REGISTRY

HEAVY = ("mlx", "mlx.core", "mlx_lm", "transformers", "httpx")


Rows = Callable[..., dict[str, str]]


@pytest.fixture
def shown(cli: CommandLine) -> Rows:
    """The lines of `show` by their labels."""

    def show(name: Path | str, *options: str) -> dict[str, str]:
        lines = (line.partition("  ") for line in cli.out("show", name, *options).splitlines())
        return {label: value.strip() for label, _, value in lines}

    return show


@pytest.mark.parametrize(
    "arguments",
    [["list"], ["show", "qwen3-8b"], ["show", DEFAULT_MODEL], ["show", "DRAFTER"],
     ["drafters", "qwen3-8b"], ["drafters", DEFAULT_MODEL]],
    ids=" ".join,
)  # fmt: skip
def test_lists_are_made_without_mlx_and_without_what_takes_long_to_import(
    arguments: list[str], tmp_path: Path
) -> None:
    pinned = REGISTRY[DEFAULT_MODEL].pinned
    assert pinned is not None
    folder = tmp_path / "ours" / "drafters" / "heads"
    config = MedusaConfig(HIDDEN, VOCAB, 2, 1, True, "target", VOCAB)
    mine = {"target_fingerprint": f"sha256:{pinned.sha256}"}
    save_medusa(MedusaNetwork(config), folder, mine)
    script = (
        "import json, sys; from redrafter_mlx.cli import main; status = main.run(sys.argv[2:]);"
        "print([m for m in json.loads(sys.argv[1]) if m in sys.modules], file=sys.stderr);"
        "sys.exit(status)"
    )
    words = [str(folder) if word == "DRAFTER" else word for word in arguments]
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(HEAVY), *words],
        env={**os.environ, "REDRAFTER_CACHE": str(tmp_path / "ours")},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "[]\n")
    if words[-1] != "qwen3-8b" and words != ["show", DEFAULT_MODEL]:
        assert "Medusa" in done.stdout


def test_the_machine_that_is_planned_for_is_the_one_that_mlx_finds() -> None:
    planned, found = planned_machine(), this_machine()
    assert (planned.memory, planned.on_cpu) == (found.memory, found.on_cpu)
    assert planned.working_set == pytest.approx(found.working_set, rel=0.05)


def test_a_plan_is_for_no_more_than_the_models_own_context(tmp_path: Path, shown: Rows) -> None:
    assert "context of 2,048 tokens" in shown("vicuna-7b")["memory"]
    assert "context of 8,192 tokens" in shown("qwen3-8b")["memory"]
    assert "context of 40,960 tokens" in shown("qwen3-8b", "--context", "1M")["memory"]
    file = write_gguf(tmp_path / "m.gguf", gguf_metadata(), gguf_tensors(llama_model()))
    assert "context of 128 tokens" in shown(file)["memory"]
    folder = write_folder(tmp_path / "folder", llama_model())
    (folder / "tokenizer.json").write_text("{}")
    assert "context of 128 tokens" in shown(folder)["memory"]
    assert "context of 1 token," in shown(folder, "--context", "1")["memory"] + ","


def test_show_tells_whether_a_model_has_a_chat_template(tmp_path: Path, shown: Rows) -> None:
    for template, word in (("{{ messages }}", "yes"), (None, "none")):
        metadata = gguf_metadata(tokenizer__chat_template=template)
        file = write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(llama_model()))
        assert shown(file)["chat template"].startswith(word)
    assert "--raw" in shown(file)["chat template"]


@pytest.mark.parametrize("what", ["type", "architecture", "tokenizer"])
def test_a_file_that_cannot_be_loaded_is_not_shown_to_fit(
    what: str, tmp_path: Path, shown: Rows
) -> None:
    metadata, tensors = gguf_metadata(), gguf_tensors(llama_model())
    if what == "type":
        tensors["token_embd.weight"] = ((256, 256), IQ2_S, bytes(256 * 82))
    elif what == "architecture":
        metadata["general.architecture"] = "gemma3"
    else:
        metadata["tokenizer.ggml.pre"] = "unheard-of"
    rows = shown(write_gguf(tmp_path / "m.gguf", metadata, tensors))
    assert any(word in rows["unsupported"] for word in ("IQ2_S,", "gemma3", "unheard-of"))
    assert "memory" not in rows
    assert "as it is" not in rows


def test_the_weights_of_a_gguf_file_have_its_own_name_and_their_shares(
    tmp_path: Path, shown: Rows
) -> None:
    tensors = gguf_tensors(llama_model(), Q4_1)
    for name, tensor in gguf_tensors(llama_model(), F32).items():
        if "attn" in name:  # many, and small
            tensors[name] = tensor
    file = write_gguf(tmp_path / "m.gguf", gguf_metadata(general__file_type=15), tensors)
    assert shown(file)["weights"].startswith("Q4_K_M (Q4_1 ")
    file = write_gguf(tmp_path / "m.gguf", gguf_metadata(), gguf_tensors(llama_model(), Q4_1))
    assert shown(file)["weights"] == "Q4_1"


@pytest.mark.parametrize(("vocabulary", "warned"), [(4096, True), (300, False)])
def test_four_bits_of_a_model_that_is_mostly_an_embedding_are_warned_of(
    vocabulary: int, warned: bool, tmp_path: Path, shown: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_folder(tmp_path / "folder", llama_model(vocabulary))
    (folder / "tokenizer.json").write_text("{}")
    rows = shown(folder)
    assert ("prefer 8" in rows["--quantize 4"]) == warned
    assert "prefer 8" not in rows["--quantize 8"]
    with caplog.at_level(logging.WARNING), pytest.raises(Exception, match="tokenizer"):
        load_target(folder, quantize=4)
    assert ("prefer 8" in caplog.text) == warned


@pytest.mark.parametrize(
    "name", ["qwen3_next", "qwen3_5", "olmo_hybrid", "granitemoehybrid", "nemotron_h", "falcon_h1",
             "lfm2"],
)  # fmt: skip
def test_the_recurrent_state_of_a_configuration_is_as_large_as_a_sequences(name: str) -> None:
    target = Target(hybrid_model(name))
    cache = target.new_cache()
    target.append(mx.array([[1, 2, 3]]), cache, 0)
    config = {"num_hidden_layers": 2, "hidden_size": HIDDEN, **HYBRIDS[name]}
    assert state_bytes(config, float_bytes=4) == cache.state_bytes


def test_show_has_the_size_of_a_recurrent_state(tmp_path: Path, shown: Rows) -> None:
    write_folder(tmp_path, llama_model())
    (tmp_path / "tokenizer.json").write_text("{}")
    path = tmp_path / "config.json"
    assert "recurrent state" not in shown(tmp_path)
    config = json.loads(path.read_text())
    sizes = {"num_hidden_layers": 32, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
             "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
             "full_attention_interval": 4}  # fmt: skip
    path.write_text(json.dumps({**config, "model_type": "qwen3_5", "text_config": sizes}))
    assert shown(tmp_path)["recurrent state"].startswith("52 MB a sequence")
