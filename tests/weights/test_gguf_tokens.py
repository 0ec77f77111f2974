"""The tokens of GGUF files are those of slow references and of published tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar
from unicodedata import normalize

import pytest
import regex
from hard_texts import HARD_STRINGS
from mlx_lm import generate
from weights_samples import (
    F16,
    byte_characters,
    gguf_metadata,
    gguf_tensors,
    llama_model,
    pairs_metadata,
    write_gguf,
)

from redrafter_mlx.errors import (
    DamagedFileError,
)
from redrafter_mlx.loading.target import LoadedTarget, load_target
from redrafter_mlx.weights.gguf.header import read_header
from redrafter_mlx.weights.gguf.load import load_gguf
from redrafter_mlx.weights.text.chat import encode_text, render_chat

# Output of transformers and llama.cpp for SmolLM2's own tokenizer, as other projects publish it.
PUBLISHED_IDS = {
    "Hello world": [19556, 905],
    "The quick brown fox jumps over the lazy dog": [504, 2365, 6354, 16438, 27003, 690, 260, 23790,
                                                    2767],
    "  leading spaces": [216, 2899, 5600],
    "Write a haiku about the ocean.\n": [19161, 253, 421, 30614, 563, 260, 5065, 30, 198],
    "<|im_start|>": [1],
    "<|endoftext|>": [0],
}  # fmt: skip
SYSTEM_IDS = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018,
              411, 407, 19712, 8182, 2, 198, 1, 4093, 198]  # fmt: skip
PUBLISHED_CHAT_IDS = {
    "Hello": [19556],
    "hello world": [28120, 905],
    "Hi there": [26843, 665],
    "What is the capital of France?": [1780, 314, 260, 3575, 282, 4649, 47],
    "Write a short story: Once upon a time": [19161, 253, 1890, 1977, 42, 4027, 1980, 253, 655],
    "Quelle est la capitale de la France ? Réponds en une phrase.": [
        65, 2726, 290, 1264, 2618, 47765, 1121, 367, 2618, 4649, 9148, 428, 2756, 96, 19870, 430,
        16520, 8715, 30],
    "<|im_start|>": [44, 108, 306, 79, 3738, 108, 46],
}  # fmt: skip


def sentencepiece_metadata(**changes: object) -> dict[str, object]:
    """Return the metadata of a vocabulary of bytes, two letters and two pieces of HTML."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "a", "b", "<b>", "</b>"]
    metadata = gguf_metadata(
        tokenizer__ggml__model="llama",
        tokenizer__ggml__token_type=[2, 3, 3, *[6] * 256, 1, 1, 4, 4],
        tokenizer__ggml__scores=[0.0] * 259 + [-1.0, -2.0, -1000.0, -1000.0],
        tokenizer__ggml__merges=None,
        **changes,
    )
    return {**metadata, "tokenizer.ggml.tokens": texts}


@pytest.mark.parametrize("damaged", ["<0xZZ>", "<0x4", "<0x", "byte"])
def test_a_byte_token_that_names_no_byte_is_named(tmp_path: Path, damaged: str) -> None:
    path, tensors = tmp_path / "m.gguf", gguf_tensors(llama_model(), F16)
    metadata = sentencepiece_metadata()
    write_gguf(path, metadata, tensors)
    tokenizer = load_target(path).tokenizer
    assert encode_text(tokenizer, "é")[-2:] == [3 + 0xC3, 3 + 0xA9]
    texts = [*metadata["tokenizer.ggml.tokens"]]
    texts[3 + 0x41] = damaged
    write_gguf(path, {**metadata, "tokenizer.ggml.tokens": texts}, tensors)
    with pytest.raises(DamagedFileError, match=f"m.gguf: token 68 is '{damaged}'"):
        load_target(path)


def test_a_sentencepiece_vocabulary_without_a_prefix_keeps_spaces_and_html(tmp_path: Path) -> None:
    """As Gemma's, in which `</s>` ends struck text and no answer."""
    metadata = sentencepiece_metadata(tokenizer__ggml__add_space_prefix=False)
    renamed = {"</b>": "</s>", "</s>": "<eos>", "b": "\u2581"}
    texts = [renamed.get(text, text) for text in metadata["tokenizer.ggml.tokens"]]
    metadata = {**metadata, "tokenizer.ggml.tokens": texts}
    path = write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(llama_model(), F16))
    tokenizer = load_gguf(path).read_tokenizer()
    text = " a<b>a</s>  "
    ids = encode_text(tokenizer, text)
    assert texts.index("<b>") in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert {texts[i] for i in tokenizer.eos_token_ids} == {"<eos>"}
    detokenizer = tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text.removeprefix("<s>") == text


def test_a_sentencepiece_vocabulary_with_merges_goes_by_them(tmp_path: Path) -> None:
    """As Gemma 4's, whose scores say nothing."""
    metadata = sentencepiece_metadata(tokenizer__ggml__add_space_prefix=False)
    texts = [*metadata["tokenizer.ggml.tokens"][:259], "a", "b", "ab", "ba", "\u2581", "<turn|>"]
    metadata |= {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1, 3],
        "tokenizer.ggml.scores": [-1000.0] * len(texts),
    }
    tensors = gguf_tensors(llama_model(), F16)
    for merges, want in (["b a", "a b"], ["a", "ba"]), (["a b", "b a"], ["ab", "a"]):
        metadata["tokenizer.ggml.merges"] = merges
        path = write_gguf(tmp_path / "m.gguf", metadata, tensors)
        tokenizer = load_gguf(path).read_tokenizer()
        ids = encode_text(tokenizer, "aba é")
        assert [texts[i] for i in ids] == [*want, "\u2581", "<0xC3>", "<0xA9>"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == "aba é"
        assert texts.index("<turn|>") in tokenizer.eos_token_ids
    metadata["tokenizer.ggml.merges"] = ["b c"]
    with pytest.raises(DamagedFileError, match=r"m\.gguf: its tokenizer's merges"):
        load_gguf(write_gguf(path, metadata, tensors)).read_tokenizer()


PRE_TOKENIZERS = [
    "smollm", "gpt-2", "llama-bpe", "glm4", "qwen2", "deepseek-r1-qwen", "qwen35", "seed-coder",
    "bailingmoe2", "deepseek-v3", "tekken", "gpt-4o", "falcon-h1", "hunyuan-dense", "bailingmoe",
    "deepseek-llm", "deepseek-coder", "kimi-k2",
]  # fmt: skip


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_tokens_are_those_of_the_slow_reference(tmp_path: Path, pre: str) -> None:
    texts = [*HARD_STRINGS, "Հայերեն ქართული ⴀ \U0001d41b\U0001d428ld Ꟑꬰ ꭰꮿ", "ends in spaces   "]
    metadata = pairs_metadata(texts, pre)
    path = write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(llama_model(vocab_size=2000)))
    tokenizer, reference = load_gguf(path).read_tokenizer(), SlowTokenizer(path)
    for text in ["hello world", "hellohello 1212", " w wo  woas", *texts]:
        got = encode_text(tokenizer, text)
        assert got == reference.encode(text), text
        composed = normalize("NFC", text) if pre in ("qwen2", "qwen35") else text
        assert tokenizer.decode(got) == composed


@pytest.mark.real_model
def test_smollm2_tokens_are_those_of_the_slow_reference(smollm2_float32: LoadedTarget) -> None:
    target = smollm2_float32
    reference = SlowTokenizer(target.source.path)
    for text in HARD_STRINGS:
        got = encode_text(target.tokenizer, text)
        assert got == reference.encode(text), text
        assert target.tokenizer.decode(got) == text


@pytest.mark.real_model
def test_smollm2_tokens_are_those_published_for_the_original_tokenizer(
    smollm2_float32: LoadedTarget,
) -> None:
    tokenizer = smollm2_float32.tokenizer
    for text, ids in PUBLISHED_IDS.items():
        assert encode_text(tokenizer, text) == ids, text
    for question, ids in PUBLISHED_CHAT_IDS.items():
        got = render_chat(tokenizer, [{"role": "user", "content": question}])
        assert got == [*SYSTEM_IDS, *ids, 2, 198, 1, 520, 9531, 198], question


@pytest.mark.real_model
def test_smollm2_answers(smollm2_float32: LoadedTarget) -> None:
    target = smollm2_float32
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = render_chat(target.tokenizer, question)
    assert "Paris" in generate(target.model, target.tokenizer, prompt, max_tokens=12)


class SlowTokenizer:
    """Byte-level BPE as described in its papers, from the file's lists."""

    _GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    _LLAMA3 = (
        r"'(?i:s|t|re|ve|m|ll|d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    # A word's capitals come first; letters without case may be on either side.
    _CASED = (
        r"[^\r\n\p{L}\p{N}]?[[\p{L}\p{M}]--\p{Ll}]*[[\p{L}\p{M}]--[\p{Lu}\p{Lt}]]+END"
        r"|[^\r\n\p{L}\p{N}]?[[\p{L}\p{M}]--\p{Ll}]+[[\p{L}\p{M}]--[\p{Lu}\p{Lt}]]*END"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    _WORDS: ClassVar[dict[str, str | tuple[str, ...]]] = {
        "gpt-2": _GPT2,
        "smollm": (r"\p{N}", _GPT2),
        "llama-bpe": _LLAMA3,
        "glm4": _LLAMA3,
        "bailingmoe2": _LLAMA3.replace("{1,3}", "").replace(r"\s*[\r\n]+", r"\s*[\r\n]"),
        "deepseek-v3": (
            r"\p{N}{1,3}",
            r"[\u4e00-\u9fa5\u3040-\u30ff]+",
            r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?(?:\p{L}|\p{M})+"
            r"| ?(?:\p{P}|\p{S})+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        "qwen2": _LLAMA3.replace("{1,3}", ""),
        "qwen35": (
            r"'(?i:s|t|re|ve|m|ll|d)|[^\r\n\p{L}\p{N}]?(?:\p{L}|\p{M})+|\p{N}"
            r"| ?[^\s\p{L}\p{N}\p{M}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        "kimi-k2": r"\p{Han}+|"
        + _CASED.replace("[\\p{L}\\p{M}]", "[[\\p{L}\\p{M}]--\\p{Han}]")
        .replace("END", "(?:'(?i:s|t|re|ve|m|ll|d))?")
        .replace("[\\r\\n/]", "[\\r\\n]"),
        "deepseek-llm": (
            r"[\r\n]",
            r"\s?(?:[[\p{Lu}\p{Ll}\p{Lt}]--[\p{Armenian}\p{Georgian}\u1c80-\u1c88\ua790-\ua7ff"
            r"\uab30-\uab68\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001dfff]]"
            r"|[\u0531-\u0556\u10a0-\u10c5\u1c90-\u1cbf\ufb13-\ufb17])+",
            r"\s?(?:[[!-~]--[0-9]]|[\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002])+",
            r"\s+$",
            r"[\u0800-\u9fa5\uac00-\ud7ff]+",
            r"\p{N}",
        ),
        "deepseek-coder": (
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            r"[\u0800-\u9fa5\uac00-\ud7ff]+",
            r"\p{N}",
        ),
        "seed-coder": (
            r"'(?i:s|t|re|ve|m|ll|d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
            r"| ?(?:[^\s\p{L}\p{N}])+|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        "deepseek-r1-qwen": _LLAMA3.replace("{1,3}", ""),
        "tekken": _CASED.replace("END", "").replace("{1,3}", ""),
        "gpt-4o": _CASED.replace("END", "(?:'(?i:s|t|re|ve|m|ll|d))?"),
    }

    _WORDS |= {
        "falcon-h1": _WORDS["llama-bpe"], "hunyuan-dense": _WORDS["deepseek-v3"],
        "bailingmoe": _WORDS["bailingmoe2"],
    }  # fmt: skip

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self._pre = header.get("tokenizer.ggml.pre", str)
        self._ids = {t: i for i, t in enumerate(header.items("tokenizer.ggml.tokens", str))}
        merges = header.items("tokenizer.ggml.merges", str)
        self._ranks = {tuple(m.split(" ")): i for i, m in enumerate(merges)}
        self._characters = byte_characters()

    def encode(self, text: str) -> list[int]:
        text = normalize("NFC", text) if self._pre in ("qwen2", "qwen35") else text
        rules, words = self._WORDS[self._pre], [text]
        for rule in (rules,) if isinstance(rules, str) else rules:  # each splits what is left
            cut = regex.compile(f"({rule})", regex.V1)
            words = [w for word in words for w in cut.split(word) if w]
        parts = [p for w in words for p in self._merge([self._characters[b] for b in w.encode()])]
        return [self._ids[part] for part in parts]

    def _merge(self, parts: list[str]) -> list[str]:
        while True:
            ranked = [
                (self._ranks[pair], i)
                for i in range(len(parts) - 1)
                if (pair := (parts[i], parts[i + 1])) in self._ranks
            ]
            if not ranked:
                return parts
            _, i = min(ranked)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
