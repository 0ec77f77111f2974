"""Small model files made here: GGUF files byte by byte, safetensors folders, a vocabulary."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama

F32, F16, Q4_1, Q8_0, IQ2_S = 0, 1, 3, 8, 22
Tensor = tuple[tuple[int, ...], int, bytes]
"""Shape with rows first, GGUF type, and the bytes as they are in the file."""

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2", "a s"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_characters() -> list[str]:
    """Return GPT-2's printable character for each of the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return [chr(b) if b in plain else chr(256 + others.index(b)) for b in range(256)]


def vocabulary() -> list[str]:
    return [*CONTROL_TOKENS, *byte_characters(), *(m.replace(" ", "") for m in MERGES)]


def write_gguf(path: Path, metadata: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Path:
    """Write a GGUF file, version 3."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _string(key) + _value(value)
    offset, body = 0, b""
    for name, (shape, kind, data) in tensors.items():
        head += _string(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", kind, offset)
        data += bytes(-len(data) % 32)
        body += data
        offset += len(data)
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path


def gguf_metadata(**changes: object) -> dict[str, object]:
    """Return the metadata of a file of `llama_model`; keys of `changes` have `__` for dots."""
    tokens = vocabulary()
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "general.license": "apache-2.0",
        "llama.embedding_length": LLAMA["hidden_size"],
        "llama.block_count": LLAMA["num_hidden_layers"],
        "llama.feed_forward_length": LLAMA["intermediate_size"],
        "llama.attention.head_count": LLAMA["num_attention_heads"],
        "llama.attention.head_count_kv": LLAMA["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": LLAMA["rms_norm_eps"],
        "llama.context_length": LLAMA["max_position_embeddings"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in CONTROL_TOKENS else 1 for t in tokens],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    metadata.update({key.replace("__", "."): value for key, value in changes.items()})
    return {key: value for key, value in metadata.items() if value is not None}


def pairs_metadata(texts: Sequence[str], pre: str) -> dict[str, object]:
    """Return metadata whose merges join any two neighbouring bytes of a word of these texts.

    So the tokens show where the rule `pre` cuts words, even at the end of a line.
    """
    characters = byte_characters()
    spelt = ["".join(characters[b] for b in text.encode()) for text in texts]
    pairs = {f"{a} {b}": f"{a}{b}" for text in spelt for a, b in pairwise(text)}
    merges = {**{m: m.replace(" ", "") for m in MERGES}, **pairs}
    tokens = [*dict.fromkeys((*CONTROL_TOKENS, *characters, *merges.values()))]
    return gguf_metadata(
        tokenizer__ggml__pre=pre,
        tokenizer__ggml__add_bos_token=False,
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=[3 if t in CONTROL_TOKENS else 1 for t in tokens],
        tokenizer__ggml__merges=[*merges],
    )


def llama_model(vocab_size: int | None = None, **changes: object) -> nn.Module:
    """Return a random Llama with rotary embedding over halves, as in safetensors."""
    size = len(vocabulary()) if vocab_size is None else vocab_size
    mx.random.seed(3)
    model = llama.Model(llama.ModelArgs.from_dict({**LLAMA, "vocab_size": size, **changes}))
    mx.eval(model.parameters())
    return model


def gguf_tensors(model: nn.Module, kind: int = F32) -> dict[str, Tensor]:
    """Return a model's tensors under GGUF's names, query and key rows permuted as in GGUF."""
    names = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    heads = {"attn_q": LLAMA["num_attention_heads"], "attn_k": LLAMA["num_key_value_heads"]}
    tensors = {}
    for path, array in dict(tree_flatten(model.parameters())).items():
        stem = path.removesuffix(".weight")
        values = np.array(array.astype(mx.float32))
        if stem.startswith("model.layers."):
            _, _, layer, module = stem.split(".", 3)
            name = names[module]
            if name in heads:
                values = _pairs_adjacent(values, int(str(heads[name])))
            stem = f"blk.{layer}.{name}"
        else:
            stem = top[stem]
        is_matrix = values.ndim == 2
        tensors[f"{stem}.weight"] = (
            values.shape, kind if is_matrix else F32, _pack(values, kind if is_matrix else F32)
        )  # fmt: skip
    return tensors


def write_folder(folder: Path, model: nn.Module, **config: object) -> Path:
    """Write config.json and model.safetensors of a `llama_model`, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    size = weights["model.embed_tokens.weight"].shape[0]
    written = {**LLAMA, "vocab_size": size, "eos_token_id": 2, **config}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def _pairs_adjacent(values: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows in the order for rotary embedding over adjacent pairs instead of halves."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _pack(values: np.ndarray, kind: int) -> bytes:
    if kind in (F32, F16):
        return values.astype(np.float32 if kind == F32 else np.float16).tobytes()
    blocks = values.reshape(-1, 32)
    if kind == Q8_0:
        scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
        codes = np.round(blocks / scale.astype(np.float32)).astype(np.int8)
        return np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1).tobytes()
    assert kind == Q4_1
    low, high = blocks.min(axis=1, keepdims=True), blocks.max(axis=1, keepdims=True)
    scale = ((high - low) / 15).astype(np.float16)
    codes = np.clip(np.round((blocks - low) / scale.astype(np.float32)), 0, 15).astype(np.uint8)
    parts = [scale.view(np.uint8), low.astype(np.float16).view(np.uint8)]
    return np.concatenate([*parts, codes[:, :16] | codes[:, 16:] << 4], axis=1).tobytes()


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    assert isinstance(value, list)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    if value and isinstance(value[0], float):
        return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
