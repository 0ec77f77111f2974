"""Build a fast tokenizer from a SentencePiece BPE vocabulary, with exactly the same tokens.

Merges are ordered by the score of the resulting piece, as in SentencePiece. When transformers 5
builds a tokenizer from `tokenizer.model`, it orders them by the piece's id. That splits runs of
spaces differently: Llama's piece of two spaces has id 259 and the lowest score of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from redrafter_mlx.errors import DamagedFileError, UnsupportedModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece vocabulary; position i of each list describes token i.

    kinds:      SentencePiece's (and GGUF's) piece types, see the constants above
    add_prefix: whether a space is prepended to the text, SentencePiece's `add_dummy_prefix`
    """

    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    bos: int
    eos: int
    add_prefix: bool = True
    add_bos: bool = True


def read_pieces(path: Path) -> Pieces:
    """Read the vocabulary of a `tokenizer.model`.

    Raises DamagedFileError if it cannot be read, UnsupportedModelError if it is not BPE.
    """
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.Load(str(path))
    except (RuntimeError, OSError) as error:
        raise DamagedFileError(f"{path} is not a SentencePiece model") from error
    ids = range(processor.GetPieceSize())

    def kind(i: int) -> int:
        if processor.IsByte(i):
            return BYTE
        if processor.IsControl(i):
            return CONTROL
        return UNKNOWN if processor.IsUnknown(i) else NORMAL

    kinds = [kind(i) for i in ids]
    if kinds.count(BYTE) != 256:
        raise UnsupportedModelError(f"{path}: SentencePiece without byte pieces is not read")
    return Pieces(
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
    """Build a tokenizer that recognises control pieces; other text never merges into them."""
    unknown = next(
        (t for t, k in zip(pieces.texts, pieces.kinds, strict=True) if k == UNKNOWN), None
    )
    vocabulary = {text: i for i, text in enumerate(pieces.texts)}
    backend = Tokenizer(
        models.BPE(
            vocabulary,
            _merges(pieces, vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend(_SPACE)] if pieces.add_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if pieces.add_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    for kinds, special in (((UNKNOWN, CONTROL), True), ((USER_DEFINED,), False)):
        added = [t for t, k in zip(pieces.texts, pieces.kinds, strict=True) if k in kinds]
        tokens = [AddedToken(t, normalized=False, special=special) for t in added]
        backend.add_special_tokens(tokens) if special else backend.add_tokens(tokens)
    bos, eos = pieces.texts[pieces.bos], pieces.texts[pieces.eos]
    if pieces.add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, pieces.bos)]
        )
    known = {} if max_length is None else {"model_max_length": max_length}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
        **known,
    )
    return TokenizerWrapper(
        tokenizer, SPMStreamingDetokenizer, eos_token_ids=[pieces.eos, *eos_token_ids]
    )


def _merges(pieces: Pieces, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return every pair of pieces that merges into a third, ordered by its score, best first."""
    found = []
    for text, score, kind in zip(pieces.texts, pieces.scores, pieces.kinds, strict=True):
        if kind != NORMAL:
            continue
        for cut in range(1, len(text)):
            left, right = vocabulary.get(text[:cut]), vocabulary.get(text[cut:])
            if left is not None and right is not None:
                found.append((-score, left, right))
    found.sort()
    return [(pieces.texts[left], pieces.texts[right]) for _, left, right in found]
