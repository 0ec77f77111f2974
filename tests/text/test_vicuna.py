"""A Vicuna folder, SentencePiece alone and no chat template, speaks as Vicuna was trained to."""

# ruff: noqa: RUF001

from __future__ import annotations

import io
import json
import random
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import pytest
import sentencepiece
from weights_samples import gguf_metadata, gguf_tensors, llama_model, write_folder, write_gguf

from redrafter_mlx.decoding.text import TokenText
from redrafter_mlx.errors import BadInputError, DamagedFileError, UnsupportedModelError
from redrafter_mlx.loading.target import LoadedTarget, load_target
from redrafter_mlx.weights.text.chat import encode_text, render_chat
from redrafter_mlx.weights.text.spm import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    Pieces,
    read_pieces,
    spm_tokenizer,
)

VOCABULARY = 600
"""Vicuna's own has 32,000 pieces; ours are of the same four kinds."""

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)
HARD_STRINGS = [
    "", " ", "   ", "Hello world", "  two  spaces ", "    four", "x" + " " * 37 + "y",
    "\n", "\t\tx\n\n",
    "def f(x):\n    return x**2\n\n        # deep\n", "1234567890 3.14 1,000", "I'm don't they'd",
    "👩\u200d👩\u200d👧\u200d👦 émoji 🇫🇷", "日本語 漢字 かな", "한국어", "العربية",
    "e\u0301\u200d n\u0303",
    "a\u00a0b\u3000c", "½ ﬁ Å Ⅷ", "<0x41> <unk>", "</s> and <s>", "\u0000\u0001", "𝔘 \U0010ffff",
    "aaaaaaaaaaaaaaaaaaaaaa", "------====____", "user@example.org/?a=b&c",
]  # fmt: skip


@pytest.fixture(scope="module")
def pieces_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece vocabulary trained as Llama's was: BPE, bytes for what it lacks."""
    written = io.BytesIO()
    texts = Path(__file__).read_text(encoding="utf-8").splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([SYSTEM, *HARD_STRINGS, *texts]), model_writer=written,
        vocab_size=VOCABULARY, model_type="bpe", byte_fallback=True, split_digits=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, character_coverage=0.98, hard_vocab_limit=False,
        minloglevel=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    path.write_bytes(written.getvalue())
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pieces_file: Path) -> Path:
    """Its files as those of lmsys/vicuna-7b-v1.3: SentencePiece alone, and no chat template."""
    path = tmp_path_factory.mktemp("models") / "vicuna-tiny"
    model = llama_model(VOCABULARY, tie_word_embeddings=False)
    write_folder(path, model, tie_word_embeddings=False)
    shutil.copy(pieces_file, path)
    flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    special = {
        f"{name}_token": {"content": text, **flags}
        for name, text in (("bos", "<s>"), ("eos", "</s>"), ("unk", "<unk>"))
    }
    written = {"special_tokens_map.json": {**special, "pad_token": "<unk>"}}
    written["tokenizer_config.json"] = {
        **{name: {"__type": "AddedToken", **token} for name, token in special.items()},
        "add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False,
        "model_max_length": 2048, "pad_token": None, "tokenizer_class": "LlamaTokenizer",
    }  # fmt: skip
    for name, content in written.items():
        (path / name).write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def vicuna(folder: Path) -> LoadedTarget:
    return load_target(folder)


@pytest.fixture(scope="module")
def processor(pieces_file: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(pieces_file))


def test_tokens_are_sentencepieces_own(
    vicuna: LoadedTarget, processor: sentencepiece.SentencePieceProcessor
) -> None:
    for text in HARD_STRINGS:
        got = vicuna.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert got == processor.encode(text), text
        assert vicuna.tokenizer.decode(got) == text


def test_a_vocabulary_that_changes_text_first_is_refused(tmp_path: Path) -> None:
    """SentencePiece's defaults rewrite full-width letters and drop spaces."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([SYSTEM, *HARD_STRINGS]), model_writer=written, minloglevel=2,
        vocab_size=VOCABULARY, model_type="bpe", byte_fallback=True, hard_vocab_limit=False,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.model: .* changes text"):
        read_pieces(tmp_path / "tokenizer.model")


def test_raw_prompt_begins_with_one_bos(
    vicuna: LoadedTarget, processor: sentencepiece.SentencePieceProcessor
) -> None:
    want = [1, *processor.encode("USER: hi")]
    assert encode_text(vicuna.tokenizer, "USER: hi") == want
    assert encode_text(vicuna.tokenizer, "<s>USER: hi") == want


def test_conversation_is_fastchats(
    vicuna: LoadedTarget, processor: sentencepiece.SentencePieceProcessor
) -> None:
    """FastChat's vicuna_v1.1: separator " " after the user, "</s>" after the assistant."""
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Who are you?"},
    ]
    first = processor.encode(f"{SYSTEM} USER: Hi ASSISTANT: Hello.")
    second = processor.encode("USER: Who are you? ASSISTANT:")
    assert render_chat(vicuna.tokenizer, turns) == [1, *first, 2, *second]


def test_system_message_replaces_the_usual_one(
    vicuna: LoadedTarget, processor: sentencepiece.SentencePieceProcessor
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    want = [1, *processor.encode("Be brief. USER: Hi ASSISTANT:")]
    assert render_chat(vicuna.tokenizer, messages) == want


def test_end_of_text_typed_by_the_user_stays_text(
    vicuna: LoadedTarget, processor: sentencepiece.SentencePieceProcessor
) -> None:
    messages = [{"role": "user", "content": "what is </s>?"}]
    want = [1, *processor.encode(f"{SYSTEM} USER: what is </s>? ASSISTANT:")]
    assert render_chat(vicuna.tokenizer, messages) == want


@pytest.mark.parametrize("roles", [["assistant"], ["user", "user"], ["user", "tool"]])
def test_turns_out_of_order_are_refused(vicuna: LoadedTarget, roles: list[str]) -> None:
    messages = [{"role": role, "content": "x"} for role in roles]
    with pytest.raises(BadInputError, match="user and assistant"):
        render_chat(vicuna.tokenizer, messages)


def test_model_runs_and_ends_at_end_of_text(vicuna: LoadedTarget) -> None:
    assert vicuna.model(mx.array([[1, 2, 3]])).shape == (1, 3, VOCABULARY)
    assert set(vicuna.tokenizer.eos_token_ids) == {2}


def test_streamed_text_is_the_decoded_text(vicuna: LoadedTarget) -> None:
    for text in ["Hello  world\n x", "👩\u200d👧 日本"]:
        detokenizer = vicuna.tokenizer.detokenizer
        for token in vicuna.tokenizer.encode(text, add_special_tokens=False):
            detokenizer.add_token(token)
        detokenizer.finalize()
        assert detokenizer.text == text


def test_other_llama_folder_gets_no_template_of_vicunas(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "llama")
    tokenizer = load_target(other).tokenizer
    with pytest.raises(BadInputError, match=r"no chat template.*raw"):
        render_chat(tokenizer, [{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("file", "setting", "want"),
    [
        (None, "A{{ messages[0]['content'] }}", "A"),
        ("B{{ messages[0]['content'] }}", None, "B"),
        ("B{{ messages[0]['content'] }}", "A{{ messages[0]['content'] }}", "B"),
        (
            None,
            [
                {"name": "tool_use", "template": "C"},
                {"name": "default", "template": "D{{ messages[0]['content'] }}"},
            ],
            "D",
        ),
    ],
)
def test_a_folders_own_template_is_found_wherever_transformers_finds_it(
    folder: Path, tmp_path: Path, file: str | None, setting: object, want: str
) -> None:
    own = shutil.copytree(folder, tmp_path / "vicuna")
    if file is not None:
        (own / "chat_template.jinja").write_text(file)
    settings = json.loads((own / "tokenizer_config.json").read_text())
    (own / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": setting}))
    tokenizer = load_target(own).tokenizer
    got = render_chat(tokenizer, [{"role": "user", "content": "Hi"}])
    assert got == tokenizer.encode(f"{want}Hi", add_special_tokens=False)


def test_a_damaged_template_is_named(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "vicuna")
    (broken / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(DamagedFileError, match=r"chat_template\.jinja"):
        load_target(broken)


def test_tokens_added_to_the_vocabulary_are_kept(folder: Path, tmp_path: Path) -> None:
    added = shutil.copytree(folder, tmp_path / "vicuna")
    (added / "added_tokens.json").write_text(json.dumps({"<pad>": VOCABULARY, "<s>": 1}))
    tokenizer = load_target(added).tokenizer
    assert encode_text(tokenizer, "<s>a<pad>")[-1] == VOCABULARY


def test_damaged_vocabulary_is_named(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "vicuna")
    whole = (folder / "tokenizer.model").read_bytes()
    (broken / "tokenizer.model").write_bytes(whole[:1000])
    with pytest.raises(DamagedFileError, match=r"tokenizer\.model"):
        load_target(broken)


def test_gguf_with_a_sentencepiece_vocabulary_gives_sentencepieces_tokens(
    tmp_path: Path, pieces_file: Path, processor: sentencepiece.SentencePieceProcessor
) -> None:
    pieces = read_pieces(pieces_file)
    counts = [pieces.kinds.count(k) for k in (NORMAL, UNKNOWN, CONTROL, BYTE)]
    assert counts == [VOCABULARY - 259, 1, 2, 256]
    metadata = gguf_metadata(
        tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=list(pieces.texts),
        tokenizer__ggml__scores=[float(s) for s in pieces.scores],
        tokenizer__ggml__token_type=list(pieces.kinds),
        tokenizer__ggml__merges=None,
        tokenizer__ggml__add_bos_token=True,
    )
    path = write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(llama_model(VOCABULARY)))
    tokenizer = load_target(path).tokenizer
    for text in HARD_STRINGS:
        got = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert got == processor.encode(text), text
    assert encode_text(tokenizer, "hi")[0] == 1


def scored_pieces(scores: dict[str, float]) -> Pieces:
    """Return a vocabulary of these pieces, after the control and byte pieces that all have."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *scores]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(scores)]
    return Pieces("m.model", texts, [*[0.0] * 259, *scores.values()], kinds, 1, 2, False)


def merged_as_in_sentencepiece(scores: dict[str, float], text: str) -> list[str]:
    """Merge the pair with the best score until there is none, and of equal ones the leftmost."""
    parts = [*text]
    while True:
        pairs = {i: a + b for i, (a, b) in enumerate(pairwise(parts))}
        best = max(
            (i for i in pairs if pairs[i] in scores),
            key=lambda i: (scores[pairs[i]], -i),
            default=None,
        )
        if best is None:
            return parts
        parts[best : best + 2] = [pairs[best]]


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_one_score_are_merged_as_in_sentencepiece(seed: int) -> None:
    """As in Llama's vocabulary, and in Mistral's, which lacks the run of 15 spaces."""
    rng = random.Random(seed)
    lengths = rng.sample(range(3, 17), rng.randint(1, 13))
    longer = {"\u2581" * n: -1e9 for n in rng.sample([2, *lengths], len(lengths) + 1)}
    words = {"ab": -1.0, "\u2581a": -2.0, "\u2581\u2581b": -3.0, "b\u2581": -4.0, "\u2581ab": -5.0}
    scores = {"\u2581": -1e9, "a": -6.0, "b": -7.0, **words, **longer}
    tokenizer = spm_tokenizer(scored_pieces(scores))
    for _ in range(100):
        text = "".join(rng.choice(["a", "b", " " * rng.randint(1, 40)]) for _ in range(8))
        got = tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))
        assert got == merged_as_in_sentencepiece(scores, text.replace(" ", "\u2581")), text


@pytest.mark.parametrize(
    "tied",
    [
        {"ab": -1.0, "bc": -1.0},
        {"aa": -1.0, "bb": -1.0},
        {"aa": -1.0, "aaa": -1.0, "aaaa": -2.0},
        {"aa": -1.0, "aab": -1.0},
    ],
)
def test_other_merges_of_one_score_are_refused(tied: dict[str, float]) -> None:
    letters = dict.fromkeys("abc", 0.0)
    with pytest.raises(UnsupportedModelError, match=r"m\.model.*tokenizer\.json") as caught:
        spm_tokenizer(scored_pieces({**letters, **tied}))
    assert "\n" not in str(caught.value)


def test_a_vocabulary_may_have_no_token_of_begin_or_end() -> None:
    pieces = scored_pieces(dict.fromkeys("abc", 0.0))
    tokenizer = spm_tokenizer(replace(pieces, bos=-1, eos=-1))
    assert (tokenizer.bos_token, tokenizer.eos_token) == (None, None)
    assert tokenizer.eos_token_ids == set()
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab")) == ["a", "b"]


def test_equal_scores_of_pieces_that_no_merge_makes_are_allowed() -> None:
    """Single characters, and pieces whose parts are not in the vocabulary."""
    scores = {**dict.fromkeys("abc", 0.0), "ab": -1.0, "xyz": -1.0, "zyx": -1.0}
    tokens = spm_tokenizer(scored_pieces(scores)).tokenize("abc")
    assert tokens == ["ab", "c"]


@pytest.mark.parity
def test_vicunas_own_vocabulary_gives_sentencepieces_tokens() -> None:
    folders = (parent / "shared/data/vicuna-tokenizer" for parent in Path(__file__).parents)
    path = next((f / "tokenizer.model" for f in folders if f.exists()), None)
    if path is None:
        pytest.skip("needs Vicuna's tokenizer.model in shared/data/vicuna-tokenizer")
    tokenizer = spm_tokenizer(read_pieces(path))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    for text in [*HARD_STRINGS, *("x" + " " * n + "y" for n in range(80))]:
        got = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert got == processor.encode(text), text


def test_pieces_that_a_maker_defined_are_left_to_transformers(tmp_path: Path) -> None:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(HARD_STRINGS * 3), model_writer=written, vocab_size=400,
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=2,
        user_defined_symbols=["<|x|>"],
    )  # fmt: skip
    write_folder(tmp_path, llama_model(400))
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    tokenizer = load_target(tmp_path).tokenizer
    assert len(tokenizer.encode("<|x|>", add_special_tokens=False)) <= 2


def test_the_next_turn_begins_with_the_tokens_of_the_answer(vicuna: LoadedTarget) -> None:
    """An answer's text begins with the space after "ASSISTANT:", which the template writes too."""
    asked = [{"role": "user", "content": "Hello world"}]
    tokenizer = vicuna.tokenizer
    answer = tokenizer.encode("two spaces", add_special_tokens=False)
    text = TokenText(tokenizer).of(answer)
    begun = [*render_chat(tokenizer, asked), *answer]
    again = [*asked, {"role": "assistant", "content": text}, *asked]
    assert render_chat(tokenizer, again)[: len(begun)] == begun
