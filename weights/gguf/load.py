"""Load a GGUF file as an mlx-lm model, without requantising weights.

Every type is read without loss. A type in which every 32 weights share a scale (Q4_0 to Q8_0,
Q4_K, Q5_K, MXFP4) becomes `weight`, `scales` and `biases`. Any other becomes plain numbers, which
take two bytes each on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes

from redrafter_mlx.errors import DamagedFileError, UnsupportedModelError
from redrafter_mlx.weights.fetching.checksum import known_sha256
from redrafter_mlx.weights.gguf.architectures.architecture import Architecture
from redrafter_mlx.weights.gguf.arrays import as_in_mlx, expanded, parts_of, whole_of
from redrafter_mlx.weights.gguf.config import architecture_of, model_config, unsupported
from redrafter_mlx.weights.gguf.fingerprint import gguf_fingerprint
from redrafter_mlx.weights.gguf.header import BITS, READABLE, GGUFHeader, TensorInfo, read_header
from redrafter_mlx.weights.gguf.keys import Keys
from redrafter_mlx.weights.gguf.rope import FACTORS, rope_scaling
from redrafter_mlx.weights.gguf.tensors import quantisation, read_tensors
from redrafter_mlx.weights.gguf.tokenizer import tokenizer_from_gguf
from redrafter_mlx.weights.raw_model import RawModel, context_length

_PLAIN = {"F32": mx.float32, "BF16": mx.bfloat16}


def load_gguf(path: Path) -> RawModel:
    """Read a model; of a split file, `path` is any part.

    The stored dtype is float32 or bfloat16 if all matrices have that type, else float16, or
    bfloat16 for an architecture whose activations float16 cannot hold.

    Raises:
      DamagedFileError: truncated, or a tensor or an entry of the metadata is missing or wrong
      UnsupportedModelError: another architecture, tensor, tensor type, rope scaling or tokenizer
    """
    header, architecture, config = _described(path)
    vocabulary = header.tensors["token_embd.weight"].shape[0]
    try:
        tensors = {_path(architecture, n): t for n, t in _parameters(header).items()}
        kind, arguments = _get_classes(config)
        model = kind(arguments.from_dict(config))
        plain = expanded(tensors)
        arrays = as_in_mlx(read_tensors(tensors, plain), architecture, config)
        if hasattr(model, "sanitize"):  # Gemma 3's drops the head of a model that has none
            arrays = model.sanitize(arrays)
        _quantize_as_stored(model, {n: t for n, t in tensors.items() if n not in plain})
        model.eval()
        model.load_weights(list(arrays.items()), strict=True)
    except Exception as error:  # MLX raises errors of any type for shapes that do not fit
        text = " ".join(str(error).split())
        raise DamagedFileError(
            f"{path} does not hold the tensors of the {architecture.model_type} that it "
            f"describes: {text:.200}"
        ) from error
    licence = header.metadata.get("general.license")
    whole = known_sha256(path) if len(header.files) == 1 else None
    return RawModel(
        model,
        partial(tokenizer_from_gguf, header, vocabulary),
        model_type=architecture.model_type,
        fingerprint=gguf_fingerprint(header),
        earlier_fingerprint=None if whole is None else f"sha256:{whole}",
        context_length=context_length(config),
        stored=_stored(header, architecture),
        licence=licence if isinstance(licence, str) else None,
    )


def check_gguf(path: Path) -> None:
    """Raise as `load_gguf`, by the header alone."""
    header, *_ = _described(path)
    tokenizer_from_gguf(header, header.tensors["token_embd.weight"].shape[0])


def _described(path: Path) -> tuple[GGUFHeader, Architecture, dict[str, object]]:
    """Return the header of a file that can be loaded, and the model that it describes."""
    header = read_header(path)
    architecture = architecture_of(header)
    _check_tensors(header, architecture)
    config = model_config(header, architecture)
    scaling = rope_scaling(header, architecture, config)
    config["rope_scaling"] = scaling or config.get("rope_scaling")
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict):  # of all layers, or of each kind
        parameters.get("full_attention", parameters).update(scaling or {})
    return header, architecture, config


def _check_tensors(header: GGUFHeader, architecture: Architecture) -> None:
    """Raise UnsupportedModelError naming the first tensor, or its type, that cannot be read."""
    for name, tensor in _parameters(header).items():
        if architecture.path(name) is None:
            what = f"it holds {name:.80}, which no plain {architecture.model_type} has"
            raise unsupported(header, what)
        if tensor.type not in READABLE:
            raise UnsupportedModelError(
                f"{header.path}: tensor {name} is {tensor.type}, and read are "
                f"{', '.join(READABLE)}; take a file of one of these, such as Q4_K_M, or the "
                f"model's safetensors folder or Hub repository"
            )


def _parameters(header: GGUFHeader) -> dict[str, TensorInfo]:
    """Return the tensors of the model, without those of layers that predict later tokens."""
    keys = Keys(header, header.get("general.architecture", str))
    after = range(keys.layers, keys.whole("block_count"))
    numbers = {name: re.match(r"blk\.(\d+)\.", name) for name in header.tensors}
    return {
        name: header.tensors[name]
        for name, number in numbers.items()
        if name not in FACTORS and (number is None or int(number[1]) not in after)
    }


def _path(architecture: Architecture, name: str) -> str:
    path = architecture.path(name)
    assert path is not None, "_check_tensors has refused other names"
    return path


def _stored(header: GGUFHeader, architecture: Architecture) -> mx.Dtype:
    """Return the dtype; routers and convolutions are float32 in any file."""
    matrices = {t.type for t in header.tensors.values() if len(t.shape) >= 2}
    matrices = matrices - {"F32"} or matrices
    mixed = mx.bfloat16 if architecture.wide else mx.float16
    return _PLAIN.get(next(iter(matrices)), mixed) if len(matrices) == 1 else mixed


def _quantize_as_stored(model: nn.Module, tensors: Mapping[str, TensorInfo]) -> None:
    """Quantise the layers whose weights are quantised in the file."""
    types = {
        part.removesuffix(".weight"): tensor.type
        for name, tensor in tensors.items()
        if tensor.type in BITS
        for part in parts_of(whole_of(name))
    }

    def how(path: str, _: nn.Module) -> bool | dict[str, int | str]:
        return quantisation(types[path]) if path in types else False

    nn.quantize(model, class_predicate=how)
