"""Build a fast tokenizer from a SentencePiece BPE vocabulary, with exactly the same tokens.

Merges are ordered by the score of the resulting piece, as in SentencePiece. When transformers 5
builds a tokenizer from `tokenizer.model`, it orders them by the piece's id. That splits runs of
spaces differently: Llama's piece of two spaces has id 259 and the lowest score of all.

Of equal scores, SentencePiece merges the leftmost pair first, which an order of merges cannot
express in general. It can for runs of one character, such as Llama's and Mistral's of spaces: if
merges into longer runs come first, the leftmost run grows as far as it can before the next one
begins. Other equal scores are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import sentencepiece
from mlx_lm.tokenizer_utils import (
    SPMStreamingDetokenizer,
    StreamingDetokenizer,
    TokenizerWrapper,
    _infer_tool_parser,
)
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from redrafter_mlx.errors import DamagedFileError, UnsupportedModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_PLAIN_TEXT = "\uff21  b"
"""Text that the usual normalisations change: a full-width letter, and two spaces."""


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece vocabulary; position i of each list describes token i."""

    name: str  # of the file, for errors
    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]  # SentencePiece's (and GGUF's) piece types, see the constants above
    bos: int  # negative if there is none
    eos: int
    add_prefix: bool = True  # whether a space comes before the text, `add_dummy_prefix`
    add_bos: bool = True
    merges: Sequence[tuple[str, str]] | None = None  # pairs, in order; None: by scores


def read_pieces(path: Path) -> Pieces:
    """Read the vocabulary of a `tokenizer.model`.

    Raises DamagedFileError, or UnsupportedModelError if it is not BPE or normalises text.
    """
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.Load(str(path))
    except (RuntimeError, OSError) as error:
        raise DamagedFileError(f"{path} is not a SentencePiece model") from error
    if processor.Normalize(_PLAIN_TEXT).lstrip(_SPACE) != _PLAIN_TEXT.replace(" ", _SPACE):
        raise UnsupportedModelError(
            f"{path}: SentencePiece that changes text before it is split is not read; use a folder "
            f"with tokenizer.json"
        )
    ids, described = range(processor.GetPieceSize()), ModelProto()
    described.ParseFromString(processor.serialized_model_proto())
    kinds = [piece.type for piece in described.pieces]
    if kinds.count(BYTE) != 256:
        raise UnsupportedModelError(f"{path}: SentencePiece without byte pieces is not read")
    return Pieces(
        name=str(path),
        texts=[processor.IdToPiece(i) for i in ids],
        scores=[processor.GetScore(i) for i in ids],
        kinds=kinds,
        bos=processor.bos_id(),
        eos=processor.eos_id(),
        add_prefix=processor.EncodeAsPieces("x")[0].startswith(_SPACE),
    )


def spm_tokenizer(
    pieces: Pieces,
    *,
    eos_token_ids: Sequence[int] = (),
    chat_template: str | None = None,
    max_length: int | None = None,
) -> TokenizerWrapper:
    """Build a tokenizer that recognises control pieces; other text never merges into them.

    Raises UnsupportedModelError if equal scores leave the order of merges to the text, and
    DamagedFileError for a byte token that names no byte or a merge of pieces that are not there.
    """
    _check_bytes(pieces)
    pairs = zip(pieces.texts, pieces.kinds, strict=True)
    unknown = next((text for text, kind in pairs if kind == UNKNOWN), None)
    vocabulary = {text: i for i, text in enumerate(pieces.texts)}
    merges = _merges(pieces, vocabulary) if pieces.merges is None else [*pieces.merges]
    try:
        bpe = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    except Exception as error:  # the binding raises Exception itself
        raise DamagedFileError(f"{pieces.name}: its tokenizer's merges: {error}") from error
    backend = Tokenizer(bpe)
    prefix = [normalizers.Prepend(_SPACE)] if pieces.add_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    bos, eos = (None if i < 0 else pieces.texts[i] for i in (pieces.bos, pieces.eos))
    strip = [decoders.Strip(" ", 1, 0)] if pieces.add_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return fast_tokenizer(
        backend,
        partial(SPMStreamingDetokenizer, trim_space=pieces.add_prefix),
        pieces.texts,
        pieces.kinds,
        add_bos=pieces.add_bos,
        eos_token_ids=[*([] if eos is None else [pieces.eos]), *eos_token_ids],
        max_length=max_length,
        bos_token=bos,
        eos_token=eos,
        unk_token=unknown,
        chat_template=chat_template,
    )


def fast_tokenizer(
    backend: Tokenizer,
    detokenizer: Callable[[PreTrainedTokenizerFast], StreamingDetokenizer],
    texts: Sequence[str],
    kinds: Sequence[int],
    *,
    add_bos: bool,
    eos_token_ids: Sequence[int],
    max_length: int | None,
    **named: str | None,
) -> TokenizerWrapper:
    """Wrap a vocabulary and its merges so that control and user-defined pieces are recognised.

    texts, kinds: see `Pieces`
    named: `bos_token`, which `add_bos` prepends to texts, and others; `chat_template`
    """
    for wanted, special in (((UNKNOWN, CONTROL), True), ((USER_DEFINED,), False)):
        found = [t for t, k in zip(texts, kinds, strict=True) if k in wanted]
        added = [AddedToken(t, normalized=False, special=special) for t in found]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    bos = named["bos_token"]
    if add_bos and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        **named,
    )
    return TokenizerWrapper(
        tokenizer, detokenizer, eos_token_ids=eos_token_ids, **_tool_calls(tokenizer)
    )


def _tool_calls(tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    """Return how a model writes calls of tools, as `mlx_lm.load` finds out from its template."""
    form = _infer_tool_parser(tokenizer)
    if form is None:
        return {}
    module = import_module(f"mlx_lm.tool_parsers.{form}")
    return {
        "tool_parser": module.parse_tool_call,
        "tool_call_start": module.tool_call_start,
        "tool_call_end": module.tool_call_end,
    }


def _check_bytes(pieces: Pieces) -> None:
    """Raise DamagedFileError for a byte piece, or what mlx-lm takes for one, without its number."""
    for i, (text, kind) in enumerate(zip(pieces.texts, pieces.kinds, strict=True)):
        if (kind == BYTE or text.startswith("<0x")) and not _BYTE_TOKEN.fullmatch(text):
            raise DamagedFileError(f"{pieces.name}: token {i} is {text!r:.40}, which names no byte")


def _merges(pieces: Pieces, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return every pair of pieces that merges into a third, ordered by its score, best first."""
    found = []
    merged: dict[float, set[str]] = {}
    for text, score, kind in zip(pieces.texts, pieces.scores, pieces.kinds, strict=True):
        if kind != NORMAL:
            continue
        for cut in range(1, len(text)):
            left, right = vocabulary.get(text[:cut]), vocabulary.get(text[cut:])
            if left is not None and right is not None:
                found.append((-score, -len(text), left, right))
                merged.setdefault(score, set()).add(text)
    _check_ties(pieces.name, merged)
    found.sort()
    return [(pieces.texts[left], pieces.texts[right]) for _, _, left, right in found]


def _check_ties(name: str, merged: dict[float, set[str]]) -> None:
    """Raise UnsupportedModelError for pieces of one score, unless they are all runs of a character.

    merged: the pieces that result from merges, by their score
    """
    for texts in merged.values():
        if len(texts) == 1:
            continue
        first, second = sorted(texts)[:2]
        if texts != {t for several in merged.values() for t in several if {*t} == {first[0]}}:
            raise UnsupportedModelError(
                f"{name}: pieces {first!r:.40} and {second!r:.40} of its tokenizer have the same "
                f"score, and which is merged first would depend on the text; give a folder with "
                f"tokenizer.json instead"
            )
