"""A folder of safetensors: what mlx-lm loads, in the requested arithmetic, or why not."""

from __future__ import annotations

import io
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, quantize_model, save_model
from mlx_lm.utils import load as mlx_lm_load
from tiny import byte_tokenizer, targets_made
from transformers import CONFIG_MAPPING
from weights_samples import (
    LLAMA,
    gguf_metadata,
    gguf_tensors,
    llama_model,
    vocabulary,
    write_folder,
    write_gguf,
)

from redrafter_mlx.errors import BadInputError, DamagedFileError, RedrafterError, TooLargeError
from redrafter_mlx.loading.load import load
from redrafter_mlx.loading.target import load_target
from redrafter_mlx.runtime.device import backend
from redrafter_mlx.weights import quantised_cache
from redrafter_mlx.weights.fit.machine import this_machine
from redrafter_mlx.weights.gguf.load import load_gguf
from redrafter_mlx.weights.load_folder import stored_tokenizer
from redrafter_mlx.weights.raw_model import context_length, top_level_rope

PROMPT = mx.array([[5, 70, 12, 200, 9, 33, 101]])


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer.json of the sample vocabulary."""
    folder = tmp_path_factory.mktemp("tokenizer")
    path = write_gguf(folder / "m.gguf", gguf_metadata(), gguf_tensors(llama_model()))
    load_gguf(path).read_tokenizer().save_pretrained(folder)
    path.unlink()
    return folder


@pytest.fixture
def folder(tmp_path: Path, tokenizer_json: Path) -> Path:
    path = write_folder(tmp_path / "model", llama_model())
    _copy_tokenizer(tokenizer_json, path)
    return path


def _copy_tokenizer(source: Path, target: Path) -> None:
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())


def _quantized(tmp_path: Path, tokenizer_json: Path, bits: int, **changes: int) -> Path:
    path = tmp_path / f"quantized-{bits}"
    config = {**LLAMA, "vocab_size": len(vocabulary()), "eos_token_id": 2, **changes}
    model, config = quantize_model(llama_model(**changes), config, 32, bits)
    path.mkdir()
    save_model(path, model)
    (path / "config.json").write_text(json.dumps(config))
    _copy_tokenizer(tokenizer_json, path)
    return path


def test_folder_gives_what_mlx_lm_gives(folder: Path) -> None:
    loaded = load_target(folder)
    model, tokenizer = mlx_lm_load(str(folder))  # type: ignore[misc]
    np.testing.assert_array_equal(loaded.model(PROMPT), model(PROMPT))
    text = "hello world 123\n"
    assert loaded.tokenizer.encode(text) == tokenizer.encode(text)
    assert set(loaded.tokenizer.eos_token_ids) == set(tokenizer.eos_token_ids)


@pytest.mark.parametrize(("drafter", "models"), [("auto", 1), ("a model", 2)])
def test_a_target_is_made_once_a_load(
    folder: Path, drafter: str, models: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = targets_made(monkeypatch)
    load(folder, str(folder) if drafter == "a model" else drafter)
    assert made == ["llama"] * models


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_a_target_has_the_weights_of_its_model(
    folder: Path, tmp_path: Path, tokenizer_json: Path, bits: int | None
) -> None:
    """It is made before they are read; a CPU reads 4 and 8 bits into new arrays."""
    loaded = load_target(folder if bits is None else _quantized(tmp_path, tokenizer_json, bits))
    cache = loaded.target.new_cache()
    logits = loaded.target.logits(loaded.target.append(PROMPT, cache, 0))
    assert mx.allclose(logits, loaded.model(PROMPT), rtol=1e-4, atol=1e-4)


LONG = [1.5, 2.0, 3.0, 4.0]
ROPES: dict[str, tuple[str, dict[str, object]]] = {
    "llama, llama3": ("llama", {"rope_theta": 5e5, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}),
    "llama, linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama, base": ("llama", {"rope_theta": 1e3}),
    "qwen2, yarn": ("qwen2", {"rope_theta": 1e3, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    "qwen3, base": ("qwen3", {"rope_theta": 1e3, "head_dim": 16}),
    "qwen3, yarn": ("qwen3", {"rope_theta": 1e3, "head_dim": 16, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    "phi3, longrope": ("phi3", {
        "rope_theta": 1e3, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 32,
        "pad_token_id": 0, "rope_scaling": {
            "type": "longrope", "long_factor": LONG, "short_factor": LONG}}),
}  # fmt: skip


@pytest.mark.parametrize("case", ROPES)
def test_a_folder_of_transformers_5_gives_the_model_of_the_older_files(
    tmp_path: Path, tokenizer_json: Path, case: str
) -> None:
    kind, rope = ROPES[case]
    older = {**LLAMA, "vocab_size": len(vocabulary()), **rope, "model_type": kind}
    module, arguments = _get_classes(older)
    mx.random.seed(3)
    model = module(arguments.from_dict(older))
    path = write_folder(tmp_path / "model", model)
    newer = json.loads(CONFIG_MAPPING[kind](**older).to_json_string(use_diff=False))
    assert not {"rope_theta", "rope_scaling"} & {*newer}
    # transformers 5 keeps some keys also where older files have them
    newer.pop("partial_rotary_factor", None)
    (path / "config.json").write_text(json.dumps(newer))
    _copy_tokenizer(tokenizer_json, path)
    loaded = load_target(path)
    late = mx.concatenate([PROMPT] * 12, axis=1)
    np.testing.assert_array_equal(loaded.model(late), model(late))
    assert loaded.source.context_length == context_length(older)


def test_rotary_parameters_of_a_language_model_in_a_wrapper_are_found(
    tmp_path: Path, tokenizer_json: Path
) -> None:
    """Mistral 3 around Llama, as transformers 5 writes it and as older files are."""
    text = {**LLAMA, "vocab_size": len(vocabulary()), "rope_theta": 1e3}
    module, arguments = _get_classes({"model_type": "mistral3"})
    mx.random.seed(3)
    model = module(arguments.from_dict({"model_type": "mistral3", "text_config": text}))
    path = tmp_path / "model"
    save_model(path, model)
    _copy_tokenizer(tokenizer_json, path)
    newer = {k: v for k, v in text.items() if k != "rope_theta"}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e3}
    config = {"model_type": "mistral3", "text_config": newer}
    (path / "config.json").write_text(json.dumps(config))
    loaded = load_target(path)
    late = mx.concatenate([PROMPT] * 12, axis=1)
    np.testing.assert_array_equal(loaded.model(late), model(late))
    assert loaded.source.context_length == text["max_position_embeddings"]


def test_rotary_parameters_for_each_type_of_layer_stay_as_they_are() -> None:
    each = {"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}}
    assert top_level_rope({"rope_parameters": each}) == top_level_rope({}) == {}


def test_source_describes_what_is_in_memory(folder: Path) -> None:
    source = load_target(str(folder)).source
    assert (source.name, source.path) == (str(folder), folder.resolve())
    assert (source.model_type, source.dtype, source.bits) == ("llama", "float32", None)
    assert source.context_length == LLAMA["max_position_embeddings"]
    half = load_target(folder, dtype="float16").source
    assert half.dtype == "float16"
    assert half.fingerprint == source.fingerprint


def test_fingerprint_changes_with_config_and_with_weights(folder: Path) -> None:
    before = load_target(folder).source.fingerprint
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 5e5}))
    after_config = load_target(folder).source.fingerprint
    weights = dict(tree_flatten(llama_model().parameters()))
    weights = {n: w.astype(mx.float16) for n, w in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    assert len({before, after_config, load_target(folder).source.fingerprint}) == 3


def test_a_later_checkpoint_in_the_same_form_is_quantised_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's fingerprint covers no weights, and its headers do not change between them."""
    monkeypatch.setattr(quantised_cache, "WORTH_KEEPING", 0)
    before = load_target(folder, quantize=4)
    weights = dict(tree_flatten(llama_model().parameters()))
    name = "model.layers.1.self_attn.q_proj.weight"
    weights[name] = weights[name] + 1
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    after = load_target(folder, quantize=4)
    assert after.source.fingerprint == before.source.fingerprint
    scales = [x.model.layers[1].self_attn.q_proj.biases for x in (before, after)]
    assert not np.array_equal(*scales)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_folder_is_written_out_exactly_on_a_cpu(
    tmp_path: Path, tokenizer_json: Path, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redrafter_mlx.weights.precision.backend", lambda: "cpu")
    path = _quantized(tmp_path, tokenizer_json, bits)
    dense, kept = load_target(path), load_target(path, quantize=bits)
    assert (dense.source.bits, kept.source.bits) == (None, bits)
    layer = kept.model.layers[0].mlp.up_proj
    want = mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)
    np.testing.assert_array_equal(dense.model.layers[0].mlp.up_proj.weight, want)


def _scales_of(dtype: mx.Dtype) -> Callable[[dict[str, mx.array]], object]:
    name = "model.layers.0.mlp.up_proj.scales"
    return lambda w: w.update({name: w[name].astype(dtype)})


def test_scales_that_are_no_floats_are_damage(tmp_path: Path, tokenizer_json: Path) -> None:
    path = _quantized(tmp_path, tokenizer_json, 4)
    _rewrite(_scales_of(mx.int32))(path)
    with pytest.raises(DamagedFileError, match=r"up_proj\.scales of type int32"):
        load_target(path)


def test_a_quantised_folder_that_is_too_large_is_refused_before_it_is_dequantised(
    tmp_path: Path, tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redrafter_mlx.weights.precision.backend", lambda: "cpu")
    here = replace(this_machine(), working_set=1000, on_cpu=True)
    monkeypatch.setattr("redrafter_mlx.loading.target.this_machine", lambda: here)
    monkeypatch.setattr("redrafter_mlx.weights.precision.unpack", lambda *_: 1 / 0)
    with pytest.raises(TooLargeError, match="the weights of"):
        load_target(_quantized(tmp_path, tokenizer_json, 4))


_LITTLE = """
import resource, sys
from pathlib import Path
from redrafter_mlx.loading.target import load_target
load_target(sys.argv[1])
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 150_000_000,) * 2)
load_target(sys.argv[2])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's addresses")
@pytest.mark.skipif(backend() != "cpu", reason="MLX takes memory of its own on a GPU")
def test_a_model_for_which_memory_is_refused_is_one_line(
    tmp_path: Path, folder: Path, tokenizer_json: Path
) -> None:
    """MLX would end the process with a signal."""
    large = _quantized(tmp_path, tokenizer_json, 4, vocab_size=1_000_000)
    command = [sys.executable, "-c", _LITTLE, str(folder), str(large)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "BadInputError" in ended.stderr
    assert "cannot be brought into memory: Unable to allocate" in ended.stderr


def test_weights_that_were_edited_in_place_are_quantised_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first row of a tensor, of which the fingerprint's samples see nothing."""
    monkeypatch.setattr(quantised_cache, "WORTH_KEEPING", 0)
    load_target(folder, quantize=4)
    path = folder / "model.safetensors"
    weights = mx.load(str(path))
    assert isinstance(weights, dict)
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = mx.concatenate([mx.full(weights[name][:1].shape, 9.0), weights[name][1:]])
    mx.save_safetensors(str(path), weights, {"format": "mlx"})
    layer = load_target(folder, quantize=4).model.model.layers[0].self_attn.q_proj
    row = mx.dequantize(layer.weight[:1], layer.scales[:1], layer.biases[:1], 64, 4)
    assert mx.allclose(row, mx.full(row.shape, 9.0))


def test_a_tensor_in_two_files_is_damage(folder: Path) -> None:
    """Shards of an earlier model beside a newer one: mlx-lm would take some of each."""
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")
    with pytest.raises(
        DamagedFileError, match=r"which model-00001-of-00002\.safetensors holds too"
    ):
        load_target(folder)


def test_quantised_folder_is_not_quantised_otherwise(tmp_path: Path, tokenizer_json: Path) -> None:
    path = _quantized(tmp_path, tokenizer_json, 8)
    with pytest.raises(BadInputError, match="8 bits already"):
        load_target(path, quantize=4)


def test_quantising_on_load_leaves_what_does_not_divide(folder: Path) -> None:
    """Rows of 64 divide into groups of 64; rows of 96 do not and stay unquantised, as in mlx-lm."""
    loaded = load_target(folder, quantize=4)
    assert loaded.source.bits == 4
    assert "scales" in loaded.model.layers[0].mlp.up_proj
    assert "scales" not in loaded.model.layers[0].mlp.down_proj


def test_quantising_what_divides_nowhere_is_refused(tmp_path: Path, tokenizer_json: Path) -> None:
    model = llama_model(hidden_size=48, num_attention_heads=4)
    path = write_folder(tmp_path / "odd", model, hidden_size=48)
    _copy_tokenizer(tokenizer_json, path)
    with pytest.raises(BadInputError, match="groups of 64"):
        load_target(path, quantize=4)


@pytest.mark.parametrize("quantize", [2, 16, True, "4"])
def test_unknown_bits_are_refused(folder: Path, quantize: object) -> None:
    with pytest.raises(BadInputError, match="must be 4 or 8"):
        load_target(folder, quantize=quantize)  # type: ignore[arg-type]


def test_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(BadInputError, match="dtype is 'int8'"):
        load_target(folder, dtype="int8")  # type: ignore[arg-type]


def _rewrite(change: Callable[[dict[str, mx.array]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
        change(weights)
        mx.save_safetensors(str(folder / "model.safetensors"), weights)

    return damage


def _cut(length: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:length])

    return damage


def _write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def _config(**changes: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config.update(changes)
        kept = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return damage


def _remove(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
INDEX = json.dumps({"weight_map": {"a.weight": "model-00002-of-00002.safetensors"}}).encode()
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "tensor missing": (
        _rewrite(lambda w: w.pop(K_PROJ)),
        rf"model cannot be loaded: Missing 1 parameters: {K_PROJ}",
    ),
    "tensor extra": (
        _rewrite(lambda w: w.update({"model.odd.weight": mx.zeros(2)})),
        r"model cannot be loaded: Received 1 parameters not in model: model\.odd\.weight",
    ),
    "wrong shape": (
        _rewrite(lambda w: w.update({K_PROJ: mx.zeros((16, 64))})),
        rf"model cannot be loaded: .*shape \(16, 64\) for parameter {K_PROJ}",
    ),
    "empty file": (_cut(0), r"model\.safetensors is truncated"),
    "half a header": (_cut(50), r"model\.safetensors is truncated"),
    "half the data": (_cut(60_000), r"model\.safetensors is truncated"),
    "header is no JSON": (
        _write("model.safetensors", struct.pack("<Q", 4) + b"{{{{"),
        r"model\.safetensors is truncated",
    ),
    "shard missing": (
        _write("model.safetensors.index.json", INDEX),
        r"model-00002-of-00002\.safetensors is missing",
    ),
    "config is no JSON": (_write("config.json", b"{"), r"config\.json cannot be read"),
    "config is a list": (_write("config.json", b"[]"), r"config\.json holds no JSON object"),
    "config is nested": (_write("config.json", b"[" * 200_000), r"config\.json cannot be read"),
    "config has 6,000 digits": (
        _write("config.json", b'{"vocab_size": ' + b"1" * 6000 + b"}"),
        r"config\.json cannot be read",
    ),
    "header is nested": (
        _write("model.safetensors", struct.pack("<Q", 200_000) + b"[" * 200_000),
        r"model\.safetensors is truncated",
    ),
    "config names no type": (_config(model_type=None), r"config\.json: it names no model_type"),
    "config lacks a key": (_config(hidden_size=None), r"model cannot be loaded.*hidden_size"),
    "config contradicts": (
        _config(num_hidden_layers=3),
        r"model cannot be loaded: Missing \d+ parameters: model\.layers\.2\.",
    ),
    "millions of layers": (
        _config(num_hidden_layers=30_000_000),
        r"config\.json: num_hidden_layers is 30000000, and its weights hold at most 20 layers",
    ),
    "millions of layers in a language model": (
        _config(text_config={"num_hidden_layers": 30_000_000}),
        r"config\.json: num_hidden_layers is 30000000",
    ),
    "rotary base is a text": (_config(rope_theta="10000.0"), "model that cannot be called: rope"),
    "weights are integers": (
        _rewrite(lambda w: w.update({K_PROJ: mx.zeros((32, 64), mx.int8)})),
        rf"holds {K_PROJ} of type int8",
    ),
    "unknown architecture": (_config(model_type="nonesuch"), "type nonesuch not supported"),
    "wants its own code": (_config(model_file="m.py"), "own code"),
    "no config": (_remove("config.json"), "holds no config.json"),
    "no weights": (_remove("model.safetensors"), r"holds no model\*\.safetensors"),
    "no tokenizer": (_remove("tokenizer.json", "tokenizer_config.json"), "holds no tokenizer"),
    "tokenizer is no JSON": (_write("tokenizer.json", b"{"), r"its tokenizer cannot be read"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damage_is_named_in_one_line(folder: Path, damage: str) -> None:
    cause, words = DAMAGES[damage]
    cause(folder)
    with pytest.raises(RedrafterError, match=words) as caught:
        load_target(folder)
    assert "\n" not in str(caught.value)


def test_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a model")
    with pytest.raises(DamagedFileError, match=r"notes\.txt is not a GGUF file"):
        load_target(path)


def test_code_that_comes_with_a_tokenizer_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask on stdin, and take a line of the user's text for an answer."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 5))
    byte_tokenizer()._tokenizer.save_pretrained(tmp_path)
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "own.py").write_text(
        f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import PreTrainedTokenizerFast as Own\n"
    )
    with pytest.raises(DamagedFileError, match="tokenizer cannot be read"):
        stored_tokenizer(tmp_path, None)
    assert not (tmp_path / "ran").exists()
