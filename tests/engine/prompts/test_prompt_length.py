"""A text that can never fit is refused by its bytes: encoding megabytes takes a minute."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny import byte_model, byte_tokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from weights_samples import gguf_metadata, gguf_tensors, llama_model, write_gguf

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.engine.prompts.prompt import longest_token, text_bytes
from redrafter_mlx.errors import BadInputError, ContextLengthError
from redrafter_mlx.structured.grammar import Grammars
from redrafter_mlx.structured.plan import plan_output
from redrafter_mlx.weights.gguf.load import load_gguf
from redrafter_mlx.weights.text.chat import encode_text

RNG = random.Random(3)
TEXTS = [
    "", " ", " " * 300, "hello world " * 30, "hellohello" * 30, "\n\t\r " * 40, "=" * 200,
    "e\u0301" * 90, "\u1112\u1161\u11ab" * 50, "\u03b1\u0313\u0301\u0345" * 50, "日本語" * 60,
    "👩\u200d👩\u200d👧" * 20, "<|im_end|>" * 40, "<0x41>" * 30, "\u00a0\u2003\u3000" * 30,
    "".join(chr(RNG.randrange(1, 0xD7FF)) for _ in range(500)),
]  # fmt: skip
BYTES = [f"<0x{i:02X}>" for i in range(256)]
SENTENCEPIECE = {
    "tokenizer__ggml__model": "llama",
    "tokenizer__ggml__merges": None,
    "tokenizer__ggml__tokens": ["<unk>", "<s>", "</s>", *BYTES, "\u2581", "a", "aa", "aaa"],
    "tokenizer__ggml__token_type": [2, 3, 3, *[6] * 256, 1, 1, 1, 1],
    "tokenizer__ggml__scores": [0.0] * 259 + [-9.0, -4.0, -1.0, -2.0],
}
PRE: dict[str, dict[str, object]] = {
    "byte-level": {"tokenizer__ggml__pre": "gpt-2"},
    "composed": {"tokenizer__ggml__pre": "qwen2"},
    "SentencePiece": SENTENCEPIECE,
}


@pytest.mark.parametrize("kind", PRE)
def test_no_text_has_fewer_tokens_than_its_bytes_say(tmp_path: Path, kind: str) -> None:
    metadata = gguf_metadata(**PRE[kind])
    path = write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(llama_model()))
    tokenizer = load_gguf(path).read_tokenizer()
    longest = longest_token(tokenizer)
    assert longest is not None
    for text in [*TEXTS, *(text * 7 for text in TEXTS)]:
        assert text_bytes(text) <= longest * len(encode_text(tokenizer, text)), text


@pytest.mark.parametrize("normalizer", [normalizers.Lowercase(), normalizers.StripAccents()])
def test_a_tokenizer_that_may_drop_text_has_no_bound(normalizer: normalizers.Normalizer) -> None:
    tokenizer = byte_tokenizer()
    assert longest_token(tokenizer) is not None
    tokenizer._tokenizer.backend_tokenizer.normalizer = normalizer
    assert longest_token(tokenizer) is None


def test_a_tokenizer_with_one_token_for_any_unknown_text_has_no_bound() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=words))
    assert longest_token(wrapped) is None


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return byte_model()


HUGE = "word" * 2_000_000
DOORS: dict[str, Callable[[Redrafter], object]] = {
    "generate": lambda model: model.generate(HUGE),
    "raw": lambda model: model.generate(HUGE, raw=True),
    "stream": lambda model: model.stream(HUGE),
    "astream": lambda model: model.astream(HUGE),
    "batch": lambda model: list(model.batch(["Hi", HUGE])),
    "messages": lambda model: model.stream([{"role": "user", "content": HUGE}]),
    "session": lambda model: model.session().stream(HUGE),
    "server": lambda model: plan_output(
        model, Grammars(model.tokenizer, 258), [{"role": "user", "content": HUGE}]
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_text_beyond_the_context_is_refused_without_encoding_it(
    model: nn.Module, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    redrafter = Redrafter(model, byte_tokenizer())
    _refuse_to_encode(monkeypatch)
    with pytest.raises(ContextLengthError, match=r"512 tokens, and the prompt has at least \d+"):
        DOORS[door](redrafter)


def test_without_a_context_length_the_memory_decides(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    redrafter = Redrafter(model, byte_tokenizer(), engine=EngineOptions(memory_bytes=10**7))
    redrafter.prompts.context_length = None
    _refuse_to_encode(monkeypatch)
    with pytest.raises(BadInputError, match=r"at least \d+ tokens needs \d+\.\d+ GB"):
        redrafter.generate(HUGE)


def _refuse_to_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = PreTrainedTokenizerFast._encode_plus

    def only_short(self: PreTrainedTokenizerFast, text: str, *given: object, **named: object):
        assert len(text) < 1000, "it encodes the text"
        return encode(self, text, *given, **named)

    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", only_short)
