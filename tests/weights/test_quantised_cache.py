"""Weights that are quantised at loading are quantised only once."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from weights_samples import F16, gguf_metadata, gguf_tensors, llama_model, write_gguf

from redrafter_mlx.errors import BadInputError
from redrafter_mlx.loading.target import LoadedTarget, load_target
from redrafter_mlx.weights import precision, quantised_cache


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(quantised_cache, "WORTH_KEEPING", 0)
    return write_gguf(tmp_path / "m.gguf", gguf_metadata(), gguf_tensors(llama_model(), F16))


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "quantised").glob("*"))


def equal(a: LoadedTarget, b: LoadedTarget) -> bool:
    one, other = (dict(tree_flatten(loaded.model.parameters())) for loaded in (a, b))
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and np.array_equal(np.array(one[n]), np.array(other[n]))
        for n in one
    )


def test_the_second_load_gives_the_same_weights_and_reads_no_others(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_target(model, quantize=4)
    (file,) = kept(tmp_path)
    written = file.stat().st_mtime_ns
    honest = precision.quantize_layers

    def quantize_zeros(model: nn.Module, bits: int) -> bool:
        done = honest(model, bits)
        for module in model.modules():
            if "scales" in module:
                module.scales = mx.zeros_like(module.scales)
        return done

    monkeypatch.setattr(precision, "quantize_layers", quantize_zeros)
    assert equal(first, load_target(model, quantize=4))
    assert file.stat().st_mtime_ns == written


def test_every_precision_and_every_model_has_a_file_of_its_own(tmp_path: Path, model: Path) -> None:
    load_target(model)
    assert kept(tmp_path) == []
    load_target(model, quantize=4)
    load_target(model, quantize=8)
    load_target(model, quantize=4, dtype="bfloat16")
    assert len(kept(tmp_path)) == 3
    with pytest.raises(BadInputError):
        load_target(model, quantize=5)
    other = gguf_tensors(llama_model(rope_theta=1.0), F16)
    other["output_norm.weight"] = ((64,), 0, np.full(64, 2, np.float32).tobytes())
    write_gguf(model, gguf_metadata(), other)
    load_target(model, quantize=4)
    assert len(kept(tmp_path)) == 4


@pytest.mark.parametrize("damage", [b"", b"junk", None])
def test_a_damaged_file_counts_as_none(tmp_path: Path, model: Path, damage: bytes | None) -> None:
    first = load_target(model, quantize=4)
    (file,) = kept(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    assert equal(first, load_target(model, quantize=4))
    assert file.read_bytes() == whole


def test_a_cache_without_room_is_left_alone(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised_cache, "SHARE_OF_DISK", 0.0)
    load_target(model, quantize=4)
    assert kept(tmp_path) == []
