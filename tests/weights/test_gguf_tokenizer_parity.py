"""Tokenizers of GGUF files beside transformers' own converter of them.

Run with `-m parity`. transformers 5.24 or later must be installed.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hard_texts import HARD_STRINGS
from tokenizers import Tokenizer
from weights_samples import gguf_metadata, gguf_tensors, llama_model, pairs_metadata, write_gguf

from redrafter_mlx.weights.gguf.header import read_header
from redrafter_mlx.weights.gguf.load import load_gguf
from redrafter_mlx.weights.text.chat import encode_text

pytestmark = pytest.mark.parity


def of_transformers(path: Path) -> Tokenizer:
    """Return the tokenizer that transformers makes of a file's metadata."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    held = read_header(path).metadata
    names = mapping.GGUF_TOKENIZER_MAPPING["tokenizer"].items()
    given = {ours: held[f"tokenizer.{key}"] for key, ours in names if f"tokenizer.{key}" in held}
    return mapping.convert_gguf_tokenizer("llama", given)[0]


PRE_TOKENIZERS = [
    "gpt-2",
    "llama-bpe",
    "dbrx",
    "falcon-h1",
    "lfm2",
    "qwen2",
    "qwen35",
    "tekken",
    "gpt-4o",
]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_tokens_are_those_of_transformers(tmp_path: Path, pre: str) -> None:
    """Texts in which NFC changes nothing: transformers leaves it out for Qwen's files."""
    metadata = pairs_metadata(HARD_STRINGS, pre)
    path = write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(llama_model(vocab_size=2000)))
    reference, tokenizer = of_transformers(path), load_gguf(path).read_tokenizer()
    for text in ["hello world", "hellohello 1212", "HelloWorld'S McDonald", *HARD_STRINGS]:
        if not pre.startswith("qwen") or "\u0301" not in text:
            want = reference.encode(text, add_special_tokens=False).ids
            assert encode_text(tokenizer, text) == want, text


def test_tokens_of_gemma_4_are_those_of_transformers(tmp_path: Path) -> None:
    spelt = [text.replace(" ", "\u2581") for text in HARD_STRINGS]
    letters = [*dict.fromkeys("".join(spelt))]
    pairs = [*dict.fromkeys(f"{a} {b}" for text in spelt for a, b in pairwise(text))]
    given = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens = [*dict.fromkeys((*given, *letters, *(pair.replace(" ", "") for pair in pairs)))]
    metadata = gguf_metadata(
        tokenizer__ggml__model="gemma4",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=[3, 3, 3, 2, *[6] * 256, *[1] * (len(tokens) - 260)],
        tokenizer__ggml__scores=[-1000.0] * len(tokens),
        tokenizer__ggml__merges=pairs,
        tokenizer__ggml__add_space_prefix=False,
        tokenizer__ggml__eos_token_id=1,
        tokenizer__ggml__bos_token_id=2,
    )
    path = write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(llama_model(vocab_size=2000)))
    reference, tokenizer = of_transformers(path), load_gguf(path).read_tokenizer()
    for text in HARD_STRINGS:
        want = reference.encode(text, add_special_tokens=False).ids
        assert encode_text(tokenizer, text) == want, text
