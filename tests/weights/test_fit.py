"""Which models fit which machine, judged by their configurations alone."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from command_line import CommandLine
from hybrids import HYBRIDS
from macs import mac
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from weights_samples import (
    LLAMA,
    Q4_1,
    Q8_0,
    gguf_metadata,
    gguf_tensors,
    llama_model,
    vocabulary,
    write_folder,
    write_gguf,
)

from redrafter_mlx.errors import DownloadError, TooLargeError
from redrafter_mlx.loading.target import load_target
from redrafter_mlx.runtime.files.paths import human_size
from redrafter_mlx.weights.fetching.hub import check_room
from redrafter_mlx.weights.fit.machine import Machine, this_machine
from redrafter_mlx.weights.fit.model_size import StoredModel, of_config
from redrafter_mlx.weights.fit.needs import (
    CONTEXT,
    check_download,
    check_load,
    drafter_bytes,
    largest_named,
    needs,
    stored_model,
)
from redrafter_mlx.weights.precision import quantize_layers
from redrafter_mlx.weights.registry import REGISTRY

PUBLISHED = {
    "smollm2-135m": 0.1345, "vicuna-7b": 6.74, "vicuna-13b": 13.0, "vicuna-33b": 32.5,
    "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "llama-3.1-8b": 8.03, "llama-3.3-70b": 70.6,
    "qwen3-0.6b": 0.6, "qwen3-1.7b": 1.7, "qwen3-4b": 4.0, "qwen3-8b": 8.2, "qwen3-14b": 14.8,
    "qwen3-32b": 32.8, "mistral-7b": 7.25, "phi-3.5-mini": 3.82, "phi-4": 14.7,
}  # fmt: skip
"""Billions of parameters, as on the models' pages."""


def matrices(model: object) -> int:
    arrays = dict(tree_flatten(model.parameters())).items()  # type: ignore[attr-defined]
    return sum(array.nbytes for name, array in arrays if "norm" not in name)


@pytest.mark.parametrize("name", [e.name for e in REGISTRY.values() if not e.shape.total])
def test_a_named_model_has_as_many_parameters_as_its_page_says(name: str) -> None:
    assert REGISTRY[name].shape.parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.015)


@pytest.mark.parametrize("name", [e.name for e in REGISTRY.values() if e.shape.total])
def test_a_mixture_or_a_hybrid_is_as_large_as_its_parameters_in_its_bits(name: str) -> None:
    entry = REGISTRY[name]
    assert 4.2 < 8 * entry.size / entry.shape.total < 5.5


def test_the_cache_of_a_hybrid_is_that_of_its_layers_with_keys_and_values() -> None:
    shape = REGISTRY["qwen3.6-27b"].shape
    assert shape.cache_bytes(1000) == replace(shape, layers=16, recurrent=0).cache_bytes(1000)
    assert REGISTRY["gpt-oss-20b"].shape.cache_bytes(10_000) == 2 * 2 * 8 * 64 * 12 * (10_000 + 128)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("gemma", {"head_dim": 16, "rms_norm_eps": 1e-5}),
        ("starcoder2", {"norm_epsilon": 1e-5}),
        ("phi", {"tie_word_embeddings": False}),
        ("gpt_neox", {"tie_word_embeddings": False, "layer_norm_eps": 1e-5,
                      "rotary_emb_base": 10000, "rotary_pct": 0.25}),
    ],
)  # fmt: skip
def test_models_without_a_gate_or_without_a_key_for_tied_heads_are_sized_as_they_are(
    kind: str, keys: dict[str, object]
) -> None:
    config = {
        "model_type": kind, "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2,
        "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 128, **keys,
    }  # fmt: skip
    model, arguments = _get_classes(config)
    arrays = tree_flatten(model(arguments.from_dict(config)).parameters())
    stored = of_config(config, 0)
    assert stored is not None
    matrices = (array.size for name, array in arrays if array.ndim == 2)
    assert stored.size.parameters == sum(matrices)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_weight_bytes_are_those_of_the_model_in_memory(tied: bool, bits: int | None) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 192}
    model = llama_model(tie_word_embeddings=tied, **wide)
    model.set_dtype(mx.float16)
    if bits is not None:
        quantize_layers(model, bits)
    config = {**LLAMA, **wide, "vocab_size": len(vocabulary()), "tie_word_embeddings": tied}
    stored = of_config(config, 0)
    assert stored is not None
    assert stored.size.weight_bytes(bits) == matrices(model)


@pytest.mark.parametrize("kind", [Q4_1, Q8_0])
def test_a_gguf_files_bytes_are_those_of_the_model_in_memory_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    monkeypatch.setattr("redrafter_mlx.weights.precision.backend", lambda: "cuda")
    path = write_gguf(tmp_path / "m.gguf", gguf_metadata(), gguf_tensors(llama_model(), kind))
    stored = stored_model(path)
    assert stored is not None
    assert stored.bits == {Q4_1: 4, Q8_0: 8}[kind]
    norms = 5 * 64 * 4  # norms are counted as stored
    assert stored.nbytes - norms == matrices(load_target(path).model)


@pytest.mark.parametrize(
    "key", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"]
)
def test_a_mixture_of_experts_is_not_sized_as_a_dense_model(key: str) -> None:
    dense = {**LLAMA, "vocab_size": 100}
    assert of_config({**dense, key: 8}, 5) is None
    for none in (None, 0, 1):
        assert of_config({**dense, key: none}, 5) == of_config(dense, 5) is not None


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_model_with_recurrent_layers_is_not_sized_as_a_dense_model(name: str) -> None:
    dense = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64,
             "num_attention_heads": 4, "vocab_size": 97}  # fmt: skip
    assert of_config(dense, 5) is not None
    assert of_config({**dense, **HYBRIDS[name]}, 5) is None


def test_a_dense_model_that_reads_pictures_too_is_sized_by_its_text() -> None:
    dense = {**LLAMA, "vocab_size": 100}
    assert of_config({"text_config": dense, "vision_config": {"hidden_size": 3}}, 5) == of_config(
        dense, 5
    )


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_weights_that_are_quantised_already_are_not_quantised_again(key: str) -> None:
    stored = of_config({**LLAMA, "vocab_size": 100, key: {"bits": 4}}, 5)
    assert stored is not None
    assert stored.bits == 4


def test_only_weights_that_are_read_count_as_weights(tmp_path: Path) -> None:
    """Some repositories hold the original files as well."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 100}))
    (tmp_path / "original").mkdir()
    for name in ("model-00001-of-00002", "model-00002-of-00002", "consolidated", "original/x"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"x" * 10)
    stored = stored_model(tmp_path)
    assert stored is not None
    assert stored.nbytes == 20


def test_a_gguf_file_of_experts_is_not_sized_as_a_dense_model(tmp_path: Path) -> None:
    metadata = gguf_metadata(llama__expert_count=8)
    path = write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(llama_model()))
    assert stored_model(path) is None


def test_of_a_mixture_of_experts_only_the_size_of_its_files_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    """`list` and `show` claim nothing else, and loading still refuses weights too large."""
    snapshot = tmp_path / "models--org--experts" / "snapshots" / ("0" * 40)
    folder = write_folder(
        snapshot, llama_model(), num_local_experts=8, architectures=["MixtralForCausalLM"]
    )
    (folder / "tokenizer.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("redrafter_mlx.weights.fit.machine.planned_machine", lambda: mac(64))
    size = sum(file.stat().st_size for file in folder.iterdir())
    (row,) = (x for x in cli.out("list").splitlines() if x.startswith("org/experts"))
    assert row.split()[:5] == ["org/experts", "yes", *human_size(size).split(), "unknown"]
    rows = dict(x.split("  ", 1) for x in cli.out("show", "org/experts").splitlines())
    assert rows["on disk"].strip() == human_size(size)
    assert "memory" not in rows
    with pytest.raises(TooLargeError, match="org/experts"):
        check_load("org/experts", folder, size, Machine(1000, 1000, 10**12, on_cpu=False))


def test_a_share_that_is_too_large_needs_more_ranks() -> None:
    with pytest.raises(TooLargeError, match="more ranks"):
        check_load("m", Path("m"), 3000, Machine(2000, 2000, 10**12, on_cpu=False), shared=True)


@pytest.mark.parametrize("name", ["qwen3-1.7b", "qwen3-8b", "qwen3-14b", "qwen3-32b"])
def test_a_usual_drafter_is_about_as_large_in_memory_as_published_ones(name: str) -> None:
    known = drafter_bytes(name)
    assert known is not None
    assert REGISTRY[name].shape.drafter_bytes == pytest.approx(known, rel=0.1)


@pytest.mark.parametrize(
    ("gigabytes", "largest", "vicuna_7b", "llama_8b"),
    [
        (8, "qwen3.5-4b", [4], []),
        (16, "qwen3-14b", [8, 4], [None]),
        (64, "llama-3.3-70b", [None, 8, 4], [None]),
    ],
)
def test_each_mac_is_offered_what_fits_it(
    gigabytes: int, largest: str, vicuna_7b: list[int | None], llama_8b: list[int | None]
) -> None:
    machine = mac(gigabytes)
    named = largest_named(machine)
    assert named[0].name == largest
    for name, wanted in (("vicuna-7b", vicuna_7b), ("llama-3.1-8b", llama_8b)):
        ways = needs(REGISTRY[name].stored, machine)
        assert [way.quantize for way in ways if way.fits(machine)] == wanted


def test_a_larger_machine_fits_whatever_a_smaller_one_does() -> None:
    before: set[str] = set()
    for gigabytes in (8, 16, 24, 32, 64, 128):
        now = {entry.name for entry in largest_named(mac(gigabytes))}
        assert before <= now
        before = now
    assert before == {entry.name for entry in REGISTRY.values() if entry.context >= CONTEXT}
    assert [e.name for e in largest_named(mac(64, free_disk=200_000_000))] == ["smollm2-135m"]


def test_a_model_that_a_download_would_refuse_for_the_disk_is_not_proposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    smallest = min(REGISTRY.values(), key=lambda entry: entry.size)
    usage = shutil.disk_usage("/")._replace(free=smallest.size + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert largest_named(this_machine()) == []
    with pytest.raises(DownloadError, match="disk"):
        check_room(smallest.size)


def test_advice_names_the_option_that_fits_or_the_model() -> None:
    def advice(name: str, machine: Machine) -> str | None:
        return check_download(name, REGISTRY[name].stored, machine)

    assert advice("vicuna-7b", mac(64)) is None
    assert "--quantize 8" in str(advice("vicuna-7b", mac(16)))
    short = advice("llama-3.1-8b", mac(8))
    assert "tokens without a drafter" in str(short)
    assert "redrafter-mlx pull qwen3.5-4b" in str(short)
    with pytest.raises(TooLargeError, match="redrafter-mlx pull qwen3-14b"):
        advice("vicuna-33b", mac(16))
    same = check_download("meta-llama/Llama-3.1-8B-Instruct", _floats("llama-3.1-8b"), mac(16))
    assert "--quantize 8" in str(same)
    assert "redrafter-mlx pull llama-3.1-8b" in str(same)


@pytest.mark.parametrize("gigabytes", [8, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("name", ["llama-3.2-3b", "llama-3.1-8b", "phi-4", "qwen3-32b"])
def test_a_download_and_a_load_that_are_too_large_propose_the_same_precision(
    name: str, gigabytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, machine = _floats(name), mac(gigabytes)
    monkeypatch.setattr("redrafter_mlx.weights.fit.needs.stored_model", lambda _: stored)
    advice = []
    for check in (
        lambda: check_download("org/model", stored, machine),
        lambda: check_load("org/model", tmp_path, stored.nbytes, machine),
    ):
        try:
            advice.append(str(check()))
        except TooLargeError as error:
            advice.append(str(error))
    if stored.nbytes > machine.working_set:
        for option in ("--quantize 4", "--quantize 8"):
            assert (option in advice[0]) == (option in advice[1])


def _floats(name: str) -> StoredModel:
    shape = REGISTRY[name].shape
    return StoredModel(shape, None, shape.weight_bytes(None))


def test_what_is_asked_for_decides_what_is_needed() -> None:
    stored, machine = _floats("llama-3.1-8b"), mac(16)
    short, long = (needs(stored, machine, context=n)[0].cache for n in (1000, 4000))
    assert 4 * short == long == 4000 * 131_072
    plain, eight, four = needs(stored, machine, drafter=7)
    assert four.weights < eight.weights < plain.weights
    assert plain.drafter == 7
    on_cpu = replace(machine, on_cpu=True)
    assert needs(REGISTRY["llama-3.1-8b"].stored, on_cpu)[0].weights == 2 * plain.weights


def test_weights_beyond_the_working_set_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_metadata(), gguf_tensors(llama_model()))
    tiny = Machine(1000, 1000, 10**12, on_cpu=True)
    monkeypatch.setattr("redrafter_mlx.loading.target.this_machine", lambda: tiny)
    assert str(path) in cli.error("generate", "--model", path, "--drafter", "none", "-p", "x")


@pytest.mark.parametrize(
    ("gigabytes", "fits"), [(8, "--quantize 4"), (16, "--quantize 8"), (64, "yes")]
)
def test_screens_say_what_fits_a_mac(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine, gigabytes: int, fits: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for finds in ("this_machine", "planned_machine"):
        monkeypatch.setattr(f"redrafter_mlx.weights.fit.machine.{finds}", lambda: mac(gigabytes))
    (row,) = (x for x in cli.out("list").splitlines() if x.startswith("vicuna-7b"))
    assert f" no       13.5 GB  {fits} " in row
    assert "EAGLE, Medusa" in row
    verdicts = []
    for context in ("100", "8192"):
        rows = dict(
            x.split("  ", 1) for x in cli.out("show", "qwen3-8b", "--context", context).splitlines()
        )
        verdicts.append(rows["as it is"].strip().startswith("fits"))
    assert verdicts == [True, gigabytes > 8]
    facts = cli.json("doctor", "--json")["memory"]
    assert facts["models_may_use_bytes"] == mac(gigabytes).working_set
    assert facts["named_models"].split(", ")[0] == largest_named(mac(gigabytes))[0].name


def test_layers_with_a_window_are_counted_up_to_it() -> None:
    """As the configurations of Gemma 3, gpt-oss and EXAONE 4 describe them."""
    for kind, described, full in (
        ("gemma3_text", {"sliding_window_pattern": 6}, 5),
        ("gpt_oss", {"layer_types": 16 * ["sliding_attention", "full_attention"]}, 16),
        ("gpt_oss", {}, 16),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, 8),
    ):
        config = {**LLAMA, "num_hidden_layers": 32, "vocab_size": 100, "model_type": kind,
                  "sliding_window": 512, **described}  # fmt: skip
        stored = of_config(config, 0)
        assert stored is not None
        one = stored.size.cache_bytes(1) // 32
        assert stored.size.cache_bytes(100) == 3200 * one
        assert stored.size.cache_bytes(8192) == (full * 8192 + (32 - full) * 512) * one
        packed = (full * 8192 * 8.5 / 16 + (32 - full) * 512) * one
        assert stored.size.cache_bytes(8192, kv_bits=8) == packed
    ignored = of_config({**LLAMA, "vocab_size": 100, "sliding_window": 8}, 0)  # by mlx-lm, too
    assert ignored is not None
    assert ignored.size.cache_bytes(100) == 100 * ignored.size.cache_bytes(1)
