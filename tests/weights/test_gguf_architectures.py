"""A GGUF file of every architecture gives the logits of mlx-lm's class with the same weights.

The `gguf` package judges the names of tensors and metadata, and writes the files.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from redrafter_mlx.errors import RedrafterError, UnsupportedModelError
from redrafter_mlx.loading.target import load_target
from redrafter_mlx.weights.gguf.header import read_header
from redrafter_mlx.weights.gguf.load import check_gguf
from redrafter_mlx.weights.status import show_model

gguf = pytest.importorskip("gguf")
from gguf_cases import CASES  # noqa: E402
from gguf_files import write_file  # noqa: E402
from gguf_settings import write_yarn  # noqa: E402

PROMPT = mx.array([[5, 70, 12, 200, 9, 33, 101, 7, 7, 250, 18, 64, 3, 90, 41, 8, 55, 132, 2, 11]])
"""Longer than every window here."""


@pytest.mark.parametrize("name", CASES)
def test_a_file_gives_the_logits_of_mlx_lms_class(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.gguf"
    model = write_file(path, CASES[name])
    loaded = load_target(path, dtype="float32")
    got, want = loaded.model(PROMPT), model(PROMPT)
    assert want.std().item() > 0.1
    assert mx.abs(got - want).max().item() < 1e-4 * mx.abs(want).max().item()
    assert loaded.source.model_type == (CASES[name].read_as or CASES[name].config["model_type"])


@pytest.mark.parametrize(
    "name",
    ["qwen3moe", "qwen35", "lfm2", "granitehybrid", "nemotron_h", "falcon-h1", "kimi-linear",
     "deepseek2 of 2024"],
)  # fmt: skip
def test_no_size_is_claimed_where_layers_keep_more_than_keys(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.gguf"
    write_file(path, CASES[name])
    assert show_model(path).stored is None


@pytest.mark.parametrize("name", CASES)
def test_no_changed_setting_escapes_as_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, refused = tmp_path / "m.gguf", 0
    write_file(path, CASES[name])
    header = read_header(path)
    for key in [key for key in header.metadata if key.startswith(f"{CASES[name].name}.")]:
        for value in (0, -1, 10**9, 0.0, "x", [], [0], [1] * 50):
            changed = replace(header, metadata={**header.metadata, key: value})
            monkeypatch.setattr(
                "redrafter_mlx.weights.gguf.load.read_header", lambda _, h=changed: h
            )
            try:
                check_gguf(path)
            except RedrafterError as error:
                refused += 1
                assert "\n" not in str(error)  # noqa: PT017
    assert refused > 20


OTHERS = {*gguf.MODEL_ARCH_NAMES.values()} - {case.name for case in CASES.values()}


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_every_other_architecture_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, name)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=f"architecture {name} is not read, only llama"):
        check_gguf(path)


REFUSED = {
    "Falcon-H1 whose head is its embedding": ("falcon-h1", {"tie_word_embeddings": True}, {}),
    "norms of groups": ("falcon-h1", {}, {"ssm.group_count": 2}),
    "no DeepSeek V2": ("deepseek2 of 2025", {}, {"expert_weights_norm": True}),
    "softmax that is": ("deepseek2 of 2025", {}, {"attention.temperature_scale": 0.1}),
    "which no plain deepseek_v2 has": ("deepseek2 with sigmoid", {}, {"expert_gating_func": 1}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_mlx_lms_class_does_not_compute_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    name, config, metadata = REFUSED[words]
    case, path = CASES[name], tmp_path / "m.gguf"
    write_file(path, replace(case, config={**case.config, **config}))
    header = read_header(path)
    changed = {f"{case.name}.{key}": value for key, value in metadata.items()}
    header = replace(header, metadata={**header.metadata, **changed})
    monkeypatch.setattr("redrafter_mlx.weights.gguf.load.read_header", lambda _: header)
    with pytest.raises(UnsupportedModelError, match=words):
        check_gguf(path)


def test_mxfp4_stays_in_four_bits_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of a GPU are applied on this machine."""
    monkeypatch.setattr("redrafter_mlx.weights.precision.backend", lambda: "cuda")
    path = tmp_path / "m.gguf"
    model = write_file(path, CASES["gpt-oss"])
    loaded = load_target(path)
    experts = loaded.model.layers[0].mlp.experts.up_proj
    assert (experts.mode, experts.bits, experts.scales.dtype) == ("mxfp4", 4, mx.uint8)
    assert loaded.source.dtype == "bfloat16"  # float16 cannot hold its activations
    got, want = loaded.model(PROMPT), model(PROMPT)
    errors = mx.sort(mx.abs(got - want).max(axis=-1)[0])
    most = errors[len(errors) * 3 // 4]  # at a few positions, bfloat16 chooses other experts
    assert most.item() < 0.1 * mx.abs(want).max().item()


def test_a_rope_scaling_that_mlx_lm_would_ignore_is_named(tmp_path: Path) -> None:
    case = CASES["qwen3moe"]

    def write(writer: Any) -> None:
        case.write(writer)
        write_yarn(writer)

    write_file(tmp_path / "m.gguf", replace(case, write=write))
    with pytest.raises(UnsupportedModelError, match=r"qwen3_moe.*yarn rope scaling"):
        check_gguf(tmp_path / "m.gguf")
