"""Tokens as text: the same text as the tokenizer's own decoder, in a stream, after a prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    StreamingDetokenizer,
    TokenizerWrapper,
)
from tiny import byte_tokenizer, random_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from weights_samples import llama_model, write_folder

from redrafter_mlx.decoding.text import TextStream, TokenText
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.loading.target import load_target

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["ĠHi", "Ġthere"]
SPACE = "\u2581"
SENTENCEPIECE = decoders.Sequence(
    [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
)


def wrapped(core: Tokenizer, detokenizer: type[StreamingDetokenizer]) -> TokenizerWrapper:
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=core), detokenizer)


def byte_level(decoder: decoders.Decoder | None = None) -> Tokenizer:
    """Return a vocabulary of the bytes and of two words with their space."""
    vocabulary = {piece: i for i, piece in enumerate([*ALPHABET, *WORDS])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoder or decoders.ByteLevel()
    return core


def llama() -> Tokenizer:
    """Return a vocabulary as Llama 2's: all byte tokens, letters, words with their space."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *"abHithere"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, f"{SPACE}Hi"]))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    core.decoder = decoders.Sequence([SENTENCEPIECE, decoders.Strip(" ", 1, 0)])
    return core


KINDS = {
    "byte level": wrapped(byte_level(), BPEStreamingDetokenizer),
    "sentencepiece": wrapped(llama(), SPMStreamingDetokenizer),
}


def emitted(tokenizer: TokenizerWrapper, tokens: Sequence[int]) -> list[str]:
    """Return the text of each of these tokens in an answer, and of its end."""
    stream = TextStream(TokenText(tokenizer))
    return [*map(stream.add, tokens), stream.finish()]


def byte_tokens(tokenizer: TokenizerWrapper, raw: bytes) -> list[int]:
    """Return one token for each byte."""
    names, known = _characters(), tokenizer.get_vocab()
    return [known.get(f"<0x{byte:02X}>", known.get(names[byte])) for byte in raw]


def _characters() -> list[str]:
    """Return the character by which byte-level vocabularies write each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(20))
def test_a_stream_adds_up_to_the_bytes_of_its_tokens(kind: str, seed: int) -> None:
    """Characters may be split, and bytes may be no character at all."""
    rng = random.Random(seed)
    pieces = [*map(str.encode, ("a", " ", "\0", "é", "漢", "👩\u200d👧", "\n"))]
    pieces += [b"\xff", b"\xf0", b"\xe6\xbc"]
    raw = b"".join(rng.choice(pieces) for _ in range(30))
    text = "".join(emitted(KINDS[kind], byte_tokens(KINDS[kind], raw)))
    assert text.replace("\ufffd", "") == raw.decode("utf-8", "ignore")
    assert ("\ufffd" in text) == ("\ufffd" in raw.decode("utf-8", "replace"))


@pytest.mark.parametrize("kind", KINDS)
def test_whole_characters_are_shown_as_soon_as_they_are_complete(kind: str) -> None:
    tokens = byte_tokens(KINDS[kind], "\0é👩".encode())
    assert emitted(KINDS[kind], tokens) == ["\0", "", "é", "", "", "", "👩", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_never_become_a_character_do_not_hold_the_text_back(kind: str) -> None:
    steps = emitted(KINDS[kind], byte_tokens(KINDS[kind], b"\xff" * 100))
    assert "".join(steps) == "\ufffd" * 100
    assert "".join(steps[:50]).count("\ufffd") > 40


@pytest.mark.parametrize("kind", KINDS)
def test_a_space_at_the_start_is_part_of_the_answer(kind: str) -> None:
    known = KINDS[kind].get_vocab()
    first = known.get("ĠHi", known.get(f"{SPACE}Hi"))
    assert emitted(KINDS[kind], [first, first]) == [" Hi", " Hi", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_that_the_tokenizer_lacks_has_no_text(kind: str) -> None:
    """Vocabularies of models are padded to round numbers."""
    tokenizer = KINDS[kind]
    letter = tokenizer.get_vocab()["a"]
    assert emitted(tokenizer, [letter, len(tokenizer) + 3, letter]) == ["a", "", "a", ""]


def test_an_answer_goes_on_after_an_id_that_the_tokenizer_lacks() -> None:
    tokenizer = KINDS["sentencepiece"]
    padded = len(tokenizer) + 5
    model = Redrafter(random_model(vocab_size=padded), tokenizer, None)
    answer = model.generate([5, 6], raw=True, max_tokens=4, logit_bias={padded - 1: 1000.0})
    assert (answer.token_ids, answer.text) == ([padded - 1] * 4, "")


def test_a_chat_answer_keeps_its_first_space() -> None:
    tokenizer = byte_tokenizer()
    model = Redrafter(random_model(vocab_size=len(tokenizer)), tokenizer, None)
    (space,) = model.encode(" ", raw=True)
    assert model.generate("hello", max_tokens=3, logit_bias={space: 1000.0}).text == "   "


def test_a_byte_level_tokenizer_is_decoded_as_one_whatever_decoder_it_names(tmp_path: Path) -> None:
    """Tekken v13 names SentencePiece's decoder, which leaves `Ġ` in the text."""
    core = byte_level(SENTENCEPIECE)
    folder = write_folder(tmp_path / "tekken", llama_model(len(ALPHABET) + len(WORDS)))
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    tokenizer = load_target(folder).tokenizer
    there = tokenizer.get_vocab()["Ġthere"]
    assert tokenizer.decode([there, there]) == " there there"
    assert emitted(tokenizer, [there, *byte_tokens(tokenizer, "é\n".encode())])[-4:] == [
        "",
        "é",
        "\n",
        "",
    ]
