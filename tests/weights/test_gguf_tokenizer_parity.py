"""Tokenizers of GGUF files beside transformers' own converter of them.

Run with `-m parity`. transformers 5.24 or later must be installed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hard_texts import HARD_STRINGS
from weights_samples import gguf_tensors, llama_model, pairs_metadata, write_gguf

from redrafter_mlx.weights.chat import encode_text
from redrafter_mlx.weights.gguf.header import read_header
from redrafter_mlx.weights.gguf.load import load_gguf

pytestmark = pytest.mark.parity


PRE_TOKENIZERS = ["gpt-2", "llama-bpe", "dbrx", "lfm2", "qwen2", "qwen35", "tekken", "gpt-4o"]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_tokens_are_those_of_transformers(tmp_path: Path, pre: str) -> None:
    """Texts in which NFC changes nothing: transformers leaves it out for Qwen's files."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    metadata = pairs_metadata(HARD_STRINGS, pre)
    path = write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(llama_model(vocab_size=2000)))
    held = read_header(path).metadata
    names = mapping.GGUF_TOKENIZER_MAPPING["tokenizer"].items()
    given = {ours: held[f"tokenizer.{key}"] for key, ours in names if f"tokenizer.{key}" in held}
    reference, _ = mapping.convert_gguf_tokenizer("llama", given)
    tokenizer = load_gguf(path).read_tokenizer()
    for text in ["hello world", "hellohello 1212", "HelloWorld'S McDonald", *HARD_STRINGS]:
        if not pre.startswith("qwen") or "\u0301" not in text:
            want = reference.encode(text, add_special_tokens=False).ids
            assert encode_text(tokenizer, text) == want, text
