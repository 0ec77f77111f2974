"""Tokenizers of GGUF files beside transformers' own converter of them.

Run with `-m parity`. transformers 5.24 or later must be installed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hard_texts import HARD_STRINGS
from weights_samples import gguf_metadata, gguf_tensors, llama_model, write_gguf

from redrafter_mlx.weights.chat import encode_text
from redrafter_mlx.weights.gguf.header import read_header
from redrafter_mlx.weights.gguf.load import load_gguf

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o"])
def test_byte_level_tokens_are_those_of_transformers(tmp_path: Path, pre: str) -> None:
    """Texts in which NFC changes nothing: transformers leaves it out for Qwen's files."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    metadata = gguf_metadata(tokenizer__ggml__pre=pre, tokenizer__ggml__add_bos_token=False)
    path = write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(llama_model()))
    held = read_header(path).metadata
    names = mapping.GGUF_TOKENIZER_MAPPING["tokenizer"].items()
    given = {ours: held[f"tokenizer.{key}"] for key, ours in names if f"tokenizer.{key}" in held}
    reference, _ = mapping.convert_gguf_tokenizer("llama", given)
    tokenizer = load_gguf(path).read_tokenizer()
    for text in ["hello world", "hellohello 1212", "HelloWorld'S McDonald", *HARD_STRINGS]:
        if pre != "qwen2" or "\u0301" not in text:
            want = reference.encode(text, add_special_tokens=False).ids
            assert encode_text(tokenizer, text) == want, text
