"""Load a folder of config.json, safetensors and a tokenizer by mlx-lm, with readable errors.

Four things differ from `mlx_lm.load`. The rotary embedding that transformers 5 describes in
`rope_parameters` reaches every architecture (see raw_model.py). A LLaMA tokenizer that exists only
as SentencePiece's `tokenizer.model` gives exactly SentencePiece's tokens (see text/spm.py). A
Vicuna without a chat template gets Vicuna's. The heads of a Medusa-2 model, which are a drafter,
are left out. Code that comes with a model is never run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper, _infer_tool_parser
from mlx_lm.utils import _get_classes, load_model, load_tokenizer
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from redrafter_mlx.errors import DamagedFileError, UnsupportedModelError
from redrafter_mlx.runtime.files.json_file import read_object
from redrafter_mlx.runtime.files.regular_file import read_regular_text
from redrafter_mlx.weights.files.folder import (
    SafetensorsHeader,
    check_layers,
    check_tokenizer,
    folder_fingerprint,
    read_config,
    read_headers,
)
from redrafter_mlx.weights.raw_model import RawModel, context_length, is_unknown, top_level_rope
from redrafter_mlx.weights.text.chat import VICUNA_TEMPLATE
from redrafter_mlx.weights.text.chat_template import is_vicuna
from redrafter_mlx.weights.text.spm import USER_DEFINED, Pieces, read_pieces, spm_tokenizer

_HEADS = ("medusa_head.", "mtp.", "language_model.mtp.")
"""Beginnings of the names of tensors that are a drafter's, in files of a whole model.

mlx-lm leaves out Qwen3-Next's MTP head of the original files only, not of conversions."""

_LAYERS = (nn.Linear, nn.Embedding, nn.QuantizedLinear, nn.QuantizedEmbedding)

_LLAMA_TOKENIZERS = ("LlamaTokenizer", "LlamaTokenizerFast")


def load_folder(folder: Path, name: str) -> RawModel:
    """Read a model; `name` is what the user called it.

    Raises ModelNotFoundError if there is none, DamagedFileError naming a file,
    UnsupportedModelError for an architecture that mlx-lm does not know, or one that wants its own
    code to be run.
    """
    stored = read_config(folder)
    headers = read_headers(folder)
    tensors = sum(len(header.shapes) for header in headers.values())
    check_layers(stored, tensors, folder / "config.json")
    model, config = _load_model(folder, headers, top_level_rope(stored))
    check_tokenizer(folder)
    return RawModel(
        model,
        partial(_read_tokenizer, folder, name, config.get("eos_token_id")),
        model_type=str(stored["model_type"]),
        fingerprint=folder_fingerprint(folder, headers),
        context_length=context_length(stored),
    )


def _load_model(
    folder: Path, headers: dict[Path, SafetensorsHeader], changes: dict[str, object]
) -> tuple[nn.Module, dict[str, object]]:
    """Return the model and its configuration, in which `changes` replace keys of config.json."""
    names = [name for header in headers.values() for name in header.shapes]
    classes = _without_heads if any(n.startswith(_HEADS) for n in names) else _get_classes
    try:
        model, config = load_model(
            folder, lazy=True, strict=True, model_config=changes, get_model_classes=classes
        )
    except Exception as error:  # architectures raise errors of any type on a foreign checkpoint
        text = f"{folder} cannot be loaded: {' '.join(str(error).split()):.200}"
        raise (UnsupportedModelError if is_unknown(error) else DamagedFileError)(text) from error
    _check_types(model, folder)
    return model, config


def _check_types(model: nn.Module, folder: Path) -> None:
    """Raise DamagedFileError if a layer's stored arrays have types that it cannot compute with."""
    for path, module in model.named_modules():
        if not isinstance(module, _LAYERS):
            continue
        packed = "scales" in module
        for name, array in module.items():
            if not isinstance(array, mx.array) or (packed and module.mode != "affine"):
                continue
            whole = packed and name == "weight"
            if (array.dtype != mx.uint32) if whole else not mx.issubdtype(array.dtype, mx.floating):
                kind = str(array.dtype).removeprefix("mlx.core.")
                raise DamagedFileError(f"{folder} holds {path}.{name} of type {kind}")


def _without_heads(config: dict[str, object]) -> tuple[type[nn.Module], type]:
    """Return mlx-lm's classes of an architecture, for a checkpoint that also holds a drafter."""
    whole, args = _get_classes(config)

    class Trunk(whole):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            own = {name: a for name, a in weights.items() if not name.startswith(_HEADS)}
            rename = getattr(super(), "sanitize", dict)  # not every architecture has one
            return cast("dict[str, mx.array]", rename(own))

    return Trunk, args


def _read_tokenizer(folder: Path, name: str, ends: object) -> TokenizerWrapper:
    """Read the tokenizer; `ends` are the ids that end an answer, as config.json has them."""
    tokenizer = stored_tokenizer(folder, ends)
    if not tokenizer.has_chat_template and is_vicuna(folder, name):
        tokenizer.chat_template = VICUNA_TEMPLATE
        tokenizer.has_chat_template = True
    return tokenizer


def stored_tokenizer(folder: Path, ends: object) -> TokenizerWrapper:
    eos = [ends] if isinstance(ends, int) else ends if isinstance(ends, list) else None
    settings = folder / "tokenizer_config.json"
    known = read_object(settings) if settings.exists() else {}
    pieces = _llama_pieces(folder, known)
    if pieces is not None:
        length = known.get("model_max_length")
        return spm_tokenizer(
            pieces,
            eos_token_ids=eos or (),
            chat_template=_chat_template(folder, known),
            max_length=length if isinstance(length, int) else None,
        )
    try:
        # None would make transformers ask on stdin whether to run code that the files name.
        tokenizer = load_tokenizer(folder, {"trust_remote_code": False}, eos_token_ids=eos)
        if (parser := _parser_of_named_template(tokenizer)) is not None:
            extra = {"trust_remote_code": False, "tool_parser_type": parser}
            tokenizer = load_tokenizer(folder, extra, eos_token_ids=eos)
        _match_decoder(tokenizer)
        _ = tokenizer.detokenizer  # made here, so that what it cannot read is an error of the file
    except Exception as error:  # transformers passes on its parsers' errors, of any type
        text = " ".join(str(error).split()) or type(error).__name__
        raise DamagedFileError(f"{folder}: its tokenizer cannot be read: {text:.200}") from error
    return tokenizer


def _parser_of_named_template(tokenizer: TokenizerWrapper) -> str | None:
    """Return mlx-lm's name for the calls in a template named "tool_use"; None if there is none.

    transformers takes that template if tools are given, and mlx-lm looks into a single one only.
    """
    templates = tokenizer.chat_template
    if not isinstance(templates, dict) or tokenizer.has_tool_calling:
        return None
    template, vocabulary = templates.get("tool_use"), tokenizer.get_vocab
    named = SimpleNamespace(chat_template=template, get_vocab=vocabulary)
    return cast("str | None", _infer_tool_parser(named))


def _match_decoder(tokenizer: TokenizerWrapper) -> None:
    """Let a tokenizer that writes bytes as characters read them so, whatever decoder it names.

    Tekken v13 (Devstral 2) has a decoder for SentencePiece, which leaves a space as `Ġ`.
    """
    fast = tokenizer._tokenizer
    backend = fast.backend_tokenizer if isinstance(fast, PreTrainedTokenizerFast) else None
    if backend is None or backend.pre_tokenizer is None or backend.decoder is None:
        return
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("\n")]
    if pieces == ["Ċ"] == [backend.decoder.decode(pieces)]:
        backend.decoder = decoders.ByteLevel()


def _chat_template(folder: Path, settings: dict[str, object]) -> str | None:
    """Return the template in its own file or in tokenizer_config.json; of several, the default."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return read_regular_text(file)
        except (OSError, ValueError) as error:
            raise DamagedFileError(f"{file} cannot be read: {error!s:.200}") from error
    template = settings.get("chat_template")
    for one in template if isinstance(template, list) else ():
        if isinstance(one, dict) and one.get("name") == "default":
            template = one.get("template")
    return template if isinstance(template, str) else None


def _llama_pieces(folder: Path, settings: dict[str, object]) -> Pieces | None:
    """Return the vocabulary of a LLaMA tokenizer that exists only as tokenizer.model; else None.

    transformers handles tokenizers with tokens added to the vocabulary, with pieces that their
    maker defined, and with `legacy: false`, which requires another treatment of text after control
    tokens.
    """
    if (folder / "tokenizer.json").exists() or not (folder / "tokenizer.model").exists():
        return None
    kind = settings.get("tokenizer_class", _LLAMA_TOKENIZERS[0])
    if kind not in _LLAMA_TOKENIZERS or settings.get("legacy", True) is False:
        return None
    pieces = read_pieces(folder / "tokenizer.model")
    listed, described = folder / "added_tokens.json", settings.get("added_tokens_decoder")
    texts = {*read_object(listed)} if listed.exists() else set()
    if isinstance(described, dict):
        tokens = [token for token in described.values() if isinstance(token, dict)]
        texts |= {str(token.get("content")) for token in tokens}
    if USER_DEFINED in pieces.kinds or not texts <= {*pieces.texts}:
        return None
    return replace(pieces, add_bos=settings.get("add_bos_token", True) is not False)
