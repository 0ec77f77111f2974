"""Build the tokenizer from a GGUF file's metadata.

`tokenizer.ggml.model` gives the kind: `gpt2` is byte-level BPE with its merges, `llama` is
SentencePiece BPE with its scores, and `gemma4` the same with merges. No GGUF file holds the rule
that splits byte-level text into words before merging. `tokenizer.ggml.pre` only names the rule;
unknown names are refused.
"""

from __future__ import annotations

import re

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from redrafter_mlx.errors import DamagedFileError, UnsupportedModelError
from redrafter_mlx.weights.gguf.header import GGUFHeader
from redrafter_mlx.weights.text.spm import (
    CONTROL,
    USER_DEFINED,
    Pieces,
    fast_tokenizer,
    spm_tokenizer,
)

_HARMONY_ENDS = ("<|return|>", "<|call|>")
_ENDS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>",
    "<end_of_turn>", "<turn|>", "<eos>", "</s>", *_HARMONY_ENDS,
)  # fmt: skip
"""Control tokens that end an answer in any vocabulary that has them."""

_MARKUP = re.compile(r"<\|.*\|>|<(start|end)_of_turn>")
"""Text of a control token, which files of 2023 call user-defined. (Gemma's `</s>` is HTML.)"""

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_SEED = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_REST}"
_CHINESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}"
)
_CASED_LETTERS = (
    "[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2f\ua790-\ua7ff"
    "\uab30-\uab6f\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001dfff]]"
)
_EAST_ASIAN = "[\u0800-\u9fa5\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]", rf"\s?{_CASED_LETTERS}+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$", _EAST_ASIAN, r"\p{N}",
)  # fmt: skip
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
_MARKS = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+%(end)s"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*%(end)s"
    rf"|%(numbers)s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)
"""Words that end where capitals begin, as OpenAI's o200k and Mistral's Tekken have them."""

_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]*[{_LOWER}&&[^\p{{Han}}]]+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]+[{_LOWER}&&[^\p{{Han}}]]*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
)

_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split(*rules: str) -> pre_tokenizers.PreTokenizer:
    """Split by each rule in turn."""
    splits = [pre_tokenizers.Split(Regex(words), behavior="isolated") for words in rules]
    return pre_tokenizers.Sequence([*splits, _BYTES])


_DIGIT_BY_DIGIT = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])
_LLAMA3 = _split(_LETTERS % r"\p{N}{1,3}")
_QWEN2 = _split(_LETTERS % r"\p{N}")
_TEKKEN = _split(_CASED % {"end": "", "numbers": r"\p{N}"})
_GPT4O = _split(_CASED % {"end": f"{_ENDINGS}?", "numbers": r"\p{N}{1,3}"})
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2")
_PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "granite-docling", "exaone4"), _GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGIT_BY_DIGIT
    ),
    **dict.fromkeys((*_LLAMA3_NAMES, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "bailingmoe", "bailingmoe2"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _split(r"\p{N}{1,3}", _CHINESE, _DEEPSEEK)),
    "kimi-k2": _split(_KIMI),
    "deepseek-llm": _split(*_DEEPSEEK_LLM),
    "deepseek-coder": _split(*_DEEPSEEK_CODER),
    "qwen35": _split(_MARKS),
    "seed-coder": _split(_SEED),
    "tekken": _TEKKEN,
}
_WHOLE_WORDS = (*_LLAMA3_NAMES, "tekken")
"""Rules of tokenizers in which a word of the vocabulary is a token, whatever its merges are; they
begin texts with a token of their own."""


def tokenizer_from_gguf(header: GGUFHeader, vocab_size: int) -> TokenizerWrapper:
    """Build the tokenizer with its chat template and every token that ends an answer.

    Raises:
      DamagedFileError: the metadata lacks a part of it, or has more tokens than the model
      UnsupportedModelError: a kind of tokenizer that is not read, by name
    """
    kind = header.get("tokenizer.ggml.model", str)
    tokens = header.items("tokenizer.ggml.tokens", str)
    types = header.items("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens) or not 0 < len(tokens) <= vocab_size:
        raise DamagedFileError(
            f"{header.path}: {len(tokens)} tokens with {len(types)} types, in a vocabulary "
            f"of {vocab_size}"
        )
    types = [
        CONTROL if k == USER_DEFINED and _MARKUP.fullmatch(t) else k
        for t, k in zip(tokens, types, strict=True)
    ]
    if kind == "gpt2":
        return _byte_level(header, tokens, types)
    if kind in ("llama", "gemma4"):
        return _sentencepiece(header, tokens, types)
    raise UnsupportedModelError(
        f"{header.path}: tokenizers of kind {kind} are not read from GGUF, only gpt2, llama "
        f"and gemma4"
    )


def _byte_level(header: GGUFHeader, tokens: list[str], types: list[int]) -> TokenizerWrapper:
    pre = header.get("tokenizer.ggml.pre", str, "default")
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{header.path}: how its tokenizer cuts text into words, {pre!r}, is not known here; "
            f"known are {', '.join(_PRE_TOKENIZERS)}"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        merges = models.BPE(vocabulary, _pairs(header), ignore_merges=pre in _WHOLE_WORDS)
    except Exception as error:  # the binding raises Exception itself
        raise DamagedFileError(f"{header.path}: its tokenizer's merges: {error}") from error
    backend = Tokenizer(merges)
    if pre in ("qwen2", "qwen35"):  # and not DeepSeek's models made of Qwen
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]
    backend.decoder = decoders.ByteLevel()
    return fast_tokenizer(
        backend,
        BPEStreamingDetokenizer,
        tokens,
        types,
        add_bos=header.get("tokenizer.ggml.add_bos_token", bool, pre in _WHOLE_WORDS),
        eos_token_ids=_ends(header, tokens, types),
        max_length=_context_length(header),
        bos_token=_token(header, tokens, "bos"),
        eos_token=_token(header, tokens, "eos"),
        pad_token=_token(header, tokens, "padding"),
        unk_token=_token(header, tokens, "unknown"),
        chat_template=_chat_template(header),
    )


def _sentencepiece(header: GGUFHeader, tokens: list[str], types: list[int]) -> TokenizerWrapper:
    scores = header.items("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise DamagedFileError(f"{header.path}: {len(scores)} scores for {len(tokens)} tokens")
    bos, eos = _token(header, tokens, "bos", 1), _token(header, tokens, "eos", 2)
    assert bos is not None
    assert eos is not None
    pieces = Pieces(
        name=str(header.path),
        texts=tokens,
        scores=scores,
        kinds=types,
        bos=tokens.index(bos),
        eos=tokens.index(eos),
        add_prefix=header.get("tokenizer.ggml.add_space_prefix", bool, True),
        add_bos=header.get("tokenizer.ggml.add_bos_token", bool, True),
        merges=_pairs(header) if header.get("tokenizer.ggml.model", str) == "gemma4" else None,
    )
    return spm_tokenizer(
        pieces,
        eos_token_ids=_ends(header, tokens, types),
        chat_template=_chat_template(header),
        max_length=_context_length(header),
    )


def _pairs(header: GGUFHeader) -> list[tuple[str, str]]:
    split = (merge.partition(" ") for merge in header.items("tokenizer.ggml.merges", str))
    return [(left, right) for left, _, right in split]


def _token(
    header: GGUFHeader, tokens: list[str], role: str, default: int | None = None
) -> str | None:
    """Return the text of the token with this role; None if the metadata names none."""
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in header.metadata and default is None:
        return None
    i = header.get(key, int, default)
    if not 0 <= i < len(tokens):
        raise DamagedFileError(f"{header.path}: {key} is {i} of {len(tokens)} tokens")
    return tokens[i]


def _ends(header: GGUFHeader, tokens: list[str], types: list[int]) -> list[int]:
    """Return the tokens that end an answer: those that the metadata names, and well-known ones.

    In gpt-oss's format, `<|end|>` only ends one of an answer's messages.
    """
    known = {*_ENDS} - ({"<|end|>"} if {*_HARMONY_ENDS} <= {*tokens} else set())
    named = {_token(header, tokens, role) for role in ("eos", "eot")}
    return [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if token in named or (kind == CONTROL and token in known)
    ]


def _chat_template(header: GGUFHeader) -> str | None:
    value = header.metadata.get("tokenizer.chat_template")
    return value if isinstance(value, str) else None


def _context_length(header: GGUFHeader) -> int:
    return header.get(f"{header.get('general.architecture', str)}.context_length", int)
