"""A tiny Llama with drafters in their published form, from a command line to the text."""

from __future__ import annotations

import json
from pathlib import Path

import block_samples
import mlx.core as mx
import pytest
from command_line import CommandLine
from drafter_laws import generated
from eagle_samples import LAYERS, SAMPLES, VOCAB, random_tensors, write_files
from medusa_files import AUTHORS, authors_tensors
from mlp_speculator_files import config_of, stored_tensors
from mlx.utils import tree_flatten
from tiny import byte_model, byte_tokenizer
from torch_files import write_torch_file

from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.loading.drafter import loadable_forms
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.known_drafters import KNOWN_DRAFTERS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model's folder in the form of the Hub."""
    folder = tmp_path_factory.mktemp("hub") / "tiny-llama"
    byte_tokenizer().save_pretrained(folder)
    network = byte_model(num_hidden_layers=LAYERS)
    weights = dict(tree_flatten(network.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = {**vars(network.args), "architectures": ["LlamaForCausalLM"], "eos_token_id": 999}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


PUBLISHED = {
    "EAGLE-3, the authors'": "pytorch_model.bin",
    "EAGLE-3, speculators": "model.safetensors",
    "EAGLE, with a bias": "pytorch_model.bin",
    "DFlash, the authors'": "model.safetensors",
    "DFlash, speculators": "model.safetensors",
    "DSpark, DeepSpec": "model.safetensors",
    "DFlash 2": "model.safetensors",
    "Medusa": "medusa_lm_head.pt",
    "MLP speculator": "model.safetensors",
}


def write_published(folder: Path, form: str, vocab: int = VOCAB) -> Path:
    """Write a drafter with random weights, with the authors' file names."""
    if form in block_samples.SAMPLES:
        sample = block_samples.SAMPLES[form]
        return block_samples.write_files(folder, sample, block_samples.random_tensors(sample))
    if form in SAMPLES:
        write_files(folder, SAMPLES[form], random_tensors(SAMPLES[form]))
        tensors = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
        mx.eval(tensors)
        (folder / "model.safetensors").unlink()
    else:
        config, tensors = AUTHORS, authors_tensors(V=vocab)
        if form != "Medusa":
            config, tensors = config_of(vocab_size=vocab), stored_tensors(V=vocab)
            tensors = {f"speculator.{name}": array for name, array in tensors.items()}
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    file = folder / PUBLISHED[form]
    if file.suffix == ".safetensors":
        mx.save_safetensors(str(file), tensors)
    else:
        write_torch_file(file, tensors)
        write_torch_file(folder / "training_state.pt", {"step": mx.zeros(1)})
    return folder


@pytest.mark.parametrize("form", PUBLISHED)
def test_a_published_drafter_says_what_plain_decoding_says(
    model: Path, tmp_path: Path, cli: CommandLine, form: str
) -> None:
    plain = generated(cli, model, "none")
    drafter = write_published(tmp_path / "drafter", form)
    drafted = generated(cli, model, drafter, "--beam-width", "2", "--beam-length", "3")
    assert drafted["token_ids"] == plain["token_ids"]
    assert {(shape["width"], shape["length"]) for shape in drafted["shapes"]} == {(2, 3)}


@pytest.mark.parametrize("form", ["Medusa", "MLP speculator"])
def test_a_drafter_of_another_vocabulary_is_one_line(
    model: Path, tmp_path: Path, cli: CommandLine, form: str
) -> None:
    drafter = write_published(tmp_path / "drafter", form, vocab=300)
    err = cli.error("generate", "--model", model, "--drafter", drafter, "-p", "Hi")
    assert "300" in err
    assert str(VOCAB) in err


@pytest.mark.parametrize("form", PUBLISHED)
def test_no_value_of_a_config_ends_in_a_traceback(tmp_path: Path, form: str) -> None:
    target = Target(byte_model(num_hidden_layers=LAYERS))
    folder = write_published(tmp_path / "drafter", form)
    good = json.loads((folder / "config.json").read_text())
    section = good.get("transformer_layer_config", {})
    said = []
    for key in (*good, *section, "head_dim", "rope_theta", "rope_scaling", "rope_parameters"):
        for value in (-1, 10**400, "x", [], {}):
            config = {**good, **({} if key in section else {key: value})}
            if section:
                config["transformer_layer_config"] = {**section, key: value}
            (folder / "config.json").write_text(json.dumps(config))
            try:
                DrafterFolder(folder).bind(target, byte_tokenizer())
            except RedrafterError as error:
                said.append(str(error))
    assert said or form == "Medusa", "whose shape is that of its tensors"
    assert "\n" not in "".join(said)
    assert max(map(len, said), default=0) < len(str(folder)) + 300


def test_every_known_drafter_is_of_a_form_that_loads() -> None:
    for known in {one for several in KNOWN_DRAFTERS.values() for one in several}:
        assert known.form in loadable_forms(), known
