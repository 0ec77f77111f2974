"""A GGUF file of every architecture gives the logits of mlx-lm's class with the same weights.

The `gguf` package judges the names of tensors and metadata, and writes the files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes
from weights_samples import CONTROL_TOKENS, MERGES, vocabulary

from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.loading.target import load_target
from redrafter_mlx.weights.gguf.load import check_gguf

gguf = pytest.importorskip("gguf")
Q = gguf.GGMLQuantizationType

PROMPT = mx.array([[5, 70, 12, 200, 9, 33, 101, 7, 7, 250, 18, 64, 3, 90, 41, 8, 55, 132, 2, 11]])
"""Longer than every window here."""

CONFIG = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "vocab_size": 267,
    "max_position_embeddings": 512, "rope_theta": 50000.0, "tie_word_embeddings": False,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"type": "longrope", "long_factor": [1.0, 1.5, 2.0, 4.0], "short_factor": [1.0] * 4}


def write_yarn(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)


def write_moe(writer: Any) -> None:
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(32)


def write_gpt_oss(writer: Any) -> None:
    write_moe(writer)
    write_yarn(writer)
    writer.add_sliding_window(8)


def write_gemma2(writer: Any) -> None:
    writer.add_attn_logit_softcapping(5.0)
    writer.add_final_logit_softcapping(3.0)
    writer.add_sliding_window(4096)


def write_gemma3(writer: Any) -> None:
    writer.add_sliding_window(8)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


def write_gemma3_of_ollama(writer: Any) -> None:
    """Write the same settings in other words."""
    write_gemma3(writer)
    writer.add_sliding_window_pattern([(i + 1) % 6 != 0 for i in range(7)])
    writer.add_float32("gemma3.rope.local.freq_base", 10000.0)


def write_phi3(writer: Any) -> None:
    writer.add_rope_dimension_count(8)
    writer.add_rope_scaling_orig_ctx_len(64)
    for name in ("long", "short"):
        factors = np.array(LONG[f"{name}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{name}.weight", factors)


def write_granite(writer: Any) -> None:
    writer.add_attention_scale(0.3)
    writer.add_embedding_scale(6.0)
    writer.add_residual_scale(0.4)
    writer.add_logit_scale(5.0)


@dataclass(frozen=True)
class Case:
    """An architecture: its name in GGUF, mlx-lm's configuration, its metadata.

    types: the file's types of matrices whose names contain a text; float32 for others
    """

    name: str
    config: dict[str, object]
    write: Callable[[Any], None] = lambda _: None
    types: tuple[tuple[str, Any], ...] = ()
    added: float = 0.0
    pairs: bool = False


GEMMA3 = {
    "model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 32,
    "query_pre_attn_scalar": 32, "sliding_window": 8,
    "rope_scaling": {"type": "linear", "factor": 8.0},
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
CASES = {
    "qwen2": Case("qwen2", {"model_type": "qwen2"}),
    "qwen2, yarn": Case("qwen2", {"model_type": "qwen2", "rope_scaling": YARN}, write_yarn),
    "qwen3": Case(
        "qwen3", {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
        types=(("proj", Q.Q8_0),),
    ),
    "qwen3moe": Case(
        "qwen3moe",
        {"model_type": "qwen3_moe", **MOE, "num_experts": 8, "decoder_sparse_step": 1,
         "mlp_only_layers": [], "norm_topk_prob": True},
        write_moe, types=(("switch_mlp", Q.Q8_0),),
    ),
    "gemma2": Case(
        "gemma2",
        {"model_type": "gemma2", "head_dim": 32, "query_pre_attn_scalar": 32,
         "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        write_gemma2, added=1.0,
    ),
    "gemma3": Case("gemma3", GEMMA3, write_gemma3, added=1.0),
    "gemma3, Ollama's": Case("gemma3", GEMMA3, write_gemma3_of_ollama, added=1.0),
    "phi3": Case(
        "phi3",
        {"model_type": "phi3", "partial_rotary_factor": 0.5, "rope_scaling": LONG,
         "original_max_position_embeddings": 64},
        write_phi3,
    ),
    "gpt-oss": Case(
        "gpt-oss",
        {"model_type": "gpt_oss", **MOE, "num_local_experts": 8, "intermediate_size": 32,
         "sliding_window": 8, "rope_scaling": YARN},
        write_gpt_oss, types=(("experts", Q.MXFP4), ("self_attn", Q.Q8_0)),
    ),
    "granite": Case(
        "granite",
        {"model_type": "granite", "attention_bias": False, "mlp_bias": False,
         "attention_multiplier": 0.3, "embedding_multiplier": 6.0, "residual_multiplier": 0.4,
         "logits_scaling": 5.0, "tie_word_embeddings": True},
        write_granite, types=(("_proj", Q.Q8_0),), pairs=True,
    ),
}  # fmt: skip


def random_model(config: dict[str, object]) -> nn.Module:
    """Return mlx-lm's model with random numbers in every parameter, norms and biases included."""
    kind, arguments = _get_classes(config)
    model = kind(arguments.from_dict(config))
    if config["model_type"] == "gemma3_text":
        model.sanitize({})  # without a head, as published
    mx.random.seed(3)
    parameters = [
        (name, array * (array.ndim == 1) + 0.2 * mx.random.normal(array.shape))
        for name, array in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(parameters))
    return model


def write_file(path: Path, case: Case) -> nn.Module:
    """Write a file of the case, and return the model whose numbers it holds."""
    config = {**CONFIG, **case.config}
    model, layers = random_model(config), int(str(config["num_hidden_layers"]))
    writer = gguf.GGUFWriter(path, case.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    write_tokenizer(writer)
    case.write(writer)
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == case.name)
    names, held = gguf.get_tensor_name_map(architecture, layers), {}
    for name, array in dict(tree_flatten(model.parameters())).items():
        stem, _, part = name.rpartition(".")
        stem, part = (name, "weight") if part == "sinks" else (stem, part)
        values = np.array(array, np.float32)
        kind = next((kind for text, kind in case.types if text in name), Q.F32)
        kind = kind if part == "weight" and values.ndim > 1 else Q.F32
        data = gguf.quants.quantize(values, kind)
        held[name] = mx.array(gguf.quants.dequantize(data, kind).reshape(values.shape))
        if case.pairs and stem.endswith(("q_proj", "k_proj")):
            heads = config["num_attention_heads" if "q_proj" in stem else "num_key_value_heads"]
            data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        if stem.endswith("norm"):
            data = data + np.float32(case.added)
        found = names.get_name(stem.replace("switch_mlp", "experts"))
        assert found is not None, stem
        writer.add_tensor(f"{found}.{part}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.update(tree_unflatten(list(held.items())))
    return model


def write_tokenizer(writer: Any) -> None:
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROL_TOKENS else 1 for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(2)


@pytest.mark.parametrize("name", CASES)
def test_a_file_gives_the_logits_of_mlx_lms_class(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.gguf"
    model = write_file(path, CASES[name])
    loaded = load_target(path, dtype="float32")
    got, want = loaded.model(PROMPT), model(PROMPT)
    assert want.std().item() > 0.1
    assert mx.abs(got - want).max().item() < 1e-4 * mx.abs(want).max().item()
    assert loaded.source.model_type == CASES[name].config["model_type"]


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
    assert mx.abs(got - want).max().item() < 0.1 * mx.abs(want).max().item()


def test_a_rope_scaling_that_mlx_lm_would_ignore_is_named(tmp_path: Path) -> None:
    case = CASES["qwen3moe"]

    def write(writer: Any) -> None:
        case.write(writer)
        write_yarn(writer)

    write_file(tmp_path / "m.gguf", Case(case.name, case.config, write))
    with pytest.raises(UnsupportedModelError, match=r"qwen3_moe.*yarn rope scaling"):
        check_gguf(tmp_path / "m.gguf")
