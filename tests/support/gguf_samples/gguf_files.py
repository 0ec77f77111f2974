"""Small GGUF files of every architecture, written with the `gguf` package from mlx-lm's classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes
from weights_samples import CONTROL_TOKENS, MERGES, vocabulary

Q = gguf.GGMLQuantizationType

CONFIG = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "vocab_size": 267,
    "max_position_embeddings": 512, "rope_theta": 50000.0, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An architecture: its name in GGUF, mlx-lm's configuration, its metadata.

    types:   the file's types of matrices whose names contain a text; float32 for others
    renamed: parts of mlx-lm's names -> those that the `gguf` package knows
    change:  what else the converter does to a parameter, by mlx-lm's name; it may be cut in parts
    read_as: mlx-lm's class that is loaded, if it is another one
    added:   what the file adds to norms
    pairs:   whether queries and keys are permuted for rotation of adjacent pairs
    kv_heads, units: number in each layer, if they differ
    predicting: number of layers that predict later tokens
    parted:  parts of names of matrices that `change` cuts in parts of different types, which are
             found by the names of the parts; their numbers are those that Q8_0 can hold
    """

    name: str
    config: dict[str, object]
    write: Callable[[Any], None] = lambda _: None
    types: tuple[tuple[str, Any], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    change: Callable[[str, np.ndarray], np.ndarray | dict[str, np.ndarray]] = lambda _, v: v
    read_as: str = ""
    added: float = 0.0
    pairs: bool = False
    kv_heads: tuple[int, ...] = ()
    units: tuple[int, ...] = ()
    predicting: int = 0
    parted: tuple[str, ...] = ()

    def type_of(self, name: str) -> Any:
        return next((kind for text, kind in self.types if text in name), Q.F32)


def random_model(config: dict[str, object]) -> nn.Module:
    """Return mlx-lm's model with random numbers in every parameter, norms and biases included."""
    kind, arguments = _get_classes(config)
    mx.random.seed(3)
    model = kind(arguments.from_dict(config))
    if config["model_type"] == "gemma3_text":
        model.sanitize({})  # without a head, as published
    parameters = [
        (name, array * (array.ndim == 1) + 0.2 * mx.random.normal(array.shape))
        for name, array in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(parameters))
    return model


def representable(values: np.ndarray) -> np.ndarray:
    """Return numbers that are in Q8_0 as they are, even of the transposed matrix."""
    codes = np.clip(np.round(values * 160), -127, 127)
    codes[..., ::32], codes[..., ::32, :] = 127, 127
    return (codes / 512).astype(np.float32)


def write_file(path: Path, case: Case) -> nn.Module:
    """Write a file of the case, and return the model whose numbers it holds."""
    config = {**CONFIG, **case.config}
    model, layers = random_model(config), int(str(config["num_hidden_layers"]))
    writer = gguf.GGUFWriter(path, case.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers + case.predicting)
    writer.add_feed_forward_length(case.units or config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(case.kv_heads or config["num_key_value_heads"])
    writer.add_key_length(config.get("global_head_dim", config["head_dim"]))
    if "layer_norm_eps" in config:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    write_tokenizer(writer)
    case.write(writer)
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == case.name)
    names, held = gguf.get_tensor_name_map(architecture, layers), {}
    for name, array in dict(tree_flatten(model.parameters())).items():
        theirs = name
        for ours, other in (*case.renamed, ("switch_mlp", "experts"), ("sinks", "sinks.weight")):
            theirs = theirs.replace(ours, other)
        stem, _, part = theirs.rpartition(".")
        values = np.array(array, np.float32)
        parted = any(text in name for text in case.parted)
        if parted:
            values = representable(values)
        kind = case.type_of(name) if part == "weight" and values.ndim > 1 else Q.F32
        kind = Q.F32 if parted else kind
        data = gguf.quants.quantize(values, kind)
        held[name] = mx.array(gguf.quants.dequantize(data, kind).reshape(values.shape))
        if case.pairs and stem.endswith(("q_proj", "k_proj")):
            heads = config["num_attention_heads" if "q_proj" in stem else "num_key_value_heads"]
            data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        if stem.endswith("norm"):
            data = data + np.float32(case.added)
        changed = case.change(name, data)
        if "switch_glu.gate_proj" in name:  # Gemma 4's file has one tensor for gates and the rest
            gates = data
            continue
        if "switch_glu.up_proj" in name:
            changed = np.concatenate([gates, data], axis=-2)
        for each, rows in (changed if isinstance(changed, dict) else {stem: changed}).items():
            found = names.get_name(each)
            assert found is not None, each
            rows = np.ascontiguousarray(rows)
            own = case.type_of(each) if parted else kind
            if parted:
                rows = gguf.quants.quantize(rows, own)
            writer.add_tensor(f"{found}.{part}".removesuffix("."), rows, raw_dtype=own)
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
