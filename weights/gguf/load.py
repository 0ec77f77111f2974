"""Load a GGUF file of the Llama architecture as an mlx-lm model, without requantising weights.

Every type is read without loss. A type in which every 32 weights share a scale (Q4_0 to Q8_0,
Q4_K, Q5_K) becomes `weight`, `scales` and `biases`. Any other becomes plain numbers, which take two
bytes each on a GPU. GGUF permutes the rows of the query and key projections for rotary embedding
over adjacent pairs: MLX's `traditional` kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama
from mlx_lm.models.rope_utils import Llama3RoPE

from redrafter_mlx.errors import DamagedFileError, UnsupportedModelError
from redrafter_mlx.weights.checksum import known_sha256
from redrafter_mlx.weights.gguf.fingerprint import gguf_fingerprint
from redrafter_mlx.weights.gguf.header import BITS, READABLE, GGUFHeader, TensorInfo, read_header
from redrafter_mlx.weights.gguf.tensors import GROUP_SIZE, read_tensors
from redrafter_mlx.weights.gguf.tokenizer import tokenizer_from_gguf
from redrafter_mlx.weights.raw_model import RawModel, context_length

_PLAIN = {"F32": mx.float32, "BF16": mx.bfloat16}
_FREQUENCIES = "rope_freqs.weight"
_LLAMA3: dict[str, float | str] = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR_NAME = re.compile(
    rf"(token_embd|output_norm|output|rope_freqs|blk\.\d+\.({'|'.join(_LAYER_NAMES)}))\.weight"
)


def load_gguf(path: Path) -> RawModel:
    """Read a model.

    The stored dtype is float32 or bfloat16 if all matrices have that type, else float16.

    Raises:
      DamagedFileError: truncated, or a tensor or an entry of the metadata is missing or wrong
      UnsupportedModelError: a part of a split file; another architecture, tensor, tensor type, rope
        scaling or tokenizer
    """
    header, args = _described(path)
    try:
        model = llama.Model(args)
        tensors = {_mlx_name(n): t for n, t in header.tensors.items() if n != _FREQUENCIES}
        _quantize_as_stored(model, tensors)
        model.eval()
        model.load_weights(list(read_tensors(path, tensors).items()), strict=True)
    except Exception as error:  # MLX raises errors of any type for shapes that do not fit
        text = " ".join(str(error).split())
        raise DamagedFileError(
            f"{path} does not hold the tensors of the llama that it describes: {text:.200}"
        ) from error
    matrices = {t.type for t in header.tensors.values() if len(t.shape) == 2}
    licence, whole = header.metadata.get("general.license"), known_sha256(path)
    return RawModel(
        model,
        partial(tokenizer_from_gguf, header, args.vocab_size),
        model_type=args.model_type,
        fingerprint=gguf_fingerprint(header),
        earlier_fingerprint=None if whole is None else f"sha256:{whole}",
        context_length=context_length(vars(args)),
        stored=_PLAIN.get(next(iter(matrices)), mx.float16) if len(matrices) == 1 else mx.float16,
        licence=licence if isinstance(licence, str) else None,
    )


def check_gguf(path: Path) -> None:
    """Raise as `load_gguf`, by the header alone."""
    header, args = _described(path)
    tokenizer_from_gguf(header, args.vocab_size)


def _described(path: Path) -> tuple[GGUFHeader, llama.ModelArgs]:
    """Return the header of a file that can be loaded, and the model that it describes."""
    header = read_header(path)
    _check_whole(header)
    args = _model_args(header)
    _check_tensors(header)
    return header, args


def _model_args(header: GGUFHeader) -> llama.ModelArgs:
    """Return the configuration that the metadata describes; refuse layers unlike Llama's."""
    architecture = header.get("general.architecture", str)
    if architecture != "llama" or header.get("llama.expert_count", int, 0):
        kind = architecture if architecture != "llama" else "mixture-of-experts llama"
        raise _unsupported(header, f"GGUF of architecture {kind} is not read, only dense llama")
    hidden = header.get("llama.embedding_length", int)
    heads = header.get("llama.attention.head_count", int)
    if hidden <= 0 or heads <= 0:
        raise DamagedFileError(f"{header.path}: {hidden} hidden units in {heads} heads")
    head_dim = header.get("llama.attention.key_length", int, hidden // heads)
    rotary = header.get("llama.rope.dimension_count", int, head_dim)
    if rotary != head_dim:
        what = f"rotary embedding of {rotary} of {head_dim} dimensions is not read"
        raise _unsupported(header, what)
    layers = header.get("llama.block_count", int)
    if not 0 < layers <= len(header.tensors):
        raise DamagedFileError(f"{header.path}: {layers} layers, but {len(header.tensors)} tensors")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise DamagedFileError(f"{header.path}: tensor token_embd.weight is missing")
    base = header.get("llama.rope.freq_base", float, 10000.0)
    return llama.ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=header.get("llama.feed_forward_length", int),
        num_attention_heads=heads,
        num_key_value_heads=header.get("llama.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        rms_norm_eps=header.get("llama.attention.layer_norm_rms_epsilon", float),
        vocab_size=embedding.shape[0],
        max_position_embeddings=header.get("llama.context_length", int),
        rope_theta=base,
        rope_traditional=True,
        rope_scaling=_rope_scaling(header, head_dim, base),
        tie_word_embeddings="output.weight" not in header.tensors,
    )


def _rope_scaling(header: GGUFHeader, dims: int, base: float) -> dict[str, float | str] | None:
    """Return the scaling; as in llama.cpp, a file that only names a factor is scaled linearly."""
    kind = header.get("llama.rope.scaling.type", str, "linear")
    if kind not in ("none", "linear"):
        raise _unsupported(header, f"GGUF with {kind} rope scaling is not read")
    old = header.get("llama.rope.scale_linear", float, 0.0)
    factor = header.get("llama.rope.scaling.factor", float, old)
    if kind == "linear" and factor not in (0, 1):
        return {"type": "linear", "factor": factor}
    return _llama3_scaling(header, dims, base) if _FREQUENCIES in header.tensors else None


def _llama3_scaling(header: GGUFHeader, dims: int, base: float) -> dict[str, float | str]:
    """Return the scaling of Llama 3.1 and later; a GGUF file holds only the resulting factors.

    Raises UnsupportedModelError if the file's factors are not those of this scaling.
    """
    tensor = header.tensors[_FREQUENCIES]
    if tensor.type != "F32" or tensor.shape != (dims // 2,):
        raise DamagedFileError(f"{header.path}: tensor {_FREQUENCIES} has shape {tensor.shape}")
    factors = read_tensors(header.path, {"factors": tensor})["factors"]
    scaling = {"rope_type": "llama3", "factor": float(np.array(factors).max()), **_LLAMA3}
    scaled = Llama3RoPE(dims, base=base, scaling_config=scaling)._freqs
    wanted = base ** (mx.arange(0, dims, 2) / dims) * factors
    if not mx.allclose(scaled, wanted, rtol=1e-3, atol=0).item():
        raise _unsupported(header, f"the factors in {_FREQUENCIES} are not Llama 3's")
    return scaling


def _unsupported(header: GGUFHeader, what: str, give: str = "give") -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{header.path}: {what}; {give} the model's safetensors folder or Hub repository instead"
    )


def _check_whole(header: GGUFHeader) -> None:
    """Raise UnsupportedModelError for a part of a model that is split into several files."""
    count = header.get("split.count", int, 0)
    if count > 1:
        part = header.get("split.no", int, 0) + 1
        raise _unsupported(
            header,
            f"it is part {part} of {count} of a split GGUF file; join them with llama.cpp's "
            f"`llama-gguf-split --merge FIRST_PART JOINED.gguf`",
            "or give",
        )


def _check_tensors(header: GGUFHeader) -> None:
    """Raise UnsupportedModelError naming the first tensor, or its type, that cannot be read."""
    for name, tensor in header.tensors.items():
        if name.endswith(".bias"):
            raise _unsupported(header, f"it holds {name}: a llama with biases is not read")
        if not _TENSOR_NAME.fullmatch(name):
            raise _unsupported(header, f"it holds {name:.80}, which no plain llama has")
        if tensor.type not in READABLE:
            raise UnsupportedModelError(
                f"{header.path}: tensor {name} is {tensor.type}, and read are "
                f"{', '.join(READABLE)}; take a file of one of these, such as Q4_K_M, or the "
                f"model's safetensors folder or Hub repository"
            )


def _mlx_name(name: str) -> str:
    """Map to mlx-lm's name: blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    stem, _, part = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, module = stem.split(".", 2)
        return f"model.layers.{layer}.{_LAYER_NAMES.get(module, module)}.{part}"
    known = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    return f"{known.get(stem, stem)}.{part}"


def _quantize_as_stored(model: nn.Module, tensors: Mapping[str, TensorInfo]) -> None:
    """Quantise the layers whose weights are quantised in the file."""
    bits = {
        name.removesuffix(".weight"): BITS[tensor.type]
        for name, tensor in tensors.items()
        if tensor.type in BITS
    }

    def how(path: str, _: nn.Module) -> bool | dict[str, int]:
        return {"group_size": GROUP_SIZE, "bits": bits[path]} if path in bits else False

    nn.quantize(model, class_predicate=how)
