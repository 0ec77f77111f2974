"""Drafters that score all tokens with the target's output layer, restricted to some of them.

The text is the target's in every way of decoding; only the rows of those tokens are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import block_samples
import eagle_samples
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from command_line import CommandLine
from draft_models import GREEDY, PROMPT, run
from drafter_laws import decoder_with, generated, rows_accept_what_they_would_alone
from eagle_files import seen
from grammar_samples import grammars_say_what_plain_answers_say
from mtp_samples import VOCAB, load, random_head, target_model, write_head, write_model
from primitives import touching
from tiny import HIDDEN, byte_model, byte_tokenizer, plain_tokens, random_model

import redrafter_mlx
from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.level_drafter import LevelDrafter
from redrafter_mlx.drafting.published.heads.medusa import MedusaConfig, MedusaNetwork, save_medusa
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.learning.folder import LearningFolder
from redrafter_mlx.learning.kept_texts import KeptText, TextStore
from redrafter_mlx.loading.target import load_target
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.model import Target

COUNTS = np.random.default_rng(5).integers(0, 9, VOCAB)
FIRST = DraftVocabulary.most_frequent(90, np.zeros(VOCAB, np.int64))
FREQUENT = DraftVocabulary.most_frequent(60, COUNTS)
BOTH = pytest.mark.parametrize("vocabulary", [FIRST, FREQUENT], ids=["first", "frequent"])
SHAPE = BeamShape(3, 4)
TYPED = ("--beam-width", "2", "--beam-length", "3")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return target_model()


@pytest.fixture(scope="module")
def head(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("heads") / "head", random_head(model))


def tokens_of(vocabulary: DraftVocabulary) -> list[int]:
    tokens: list[int] = vocabulary.to_tokens(mx.arange(vocabulary.size)).tolist()
    return tokens


def restricted(folder: Path, target: Target, vocabulary: DraftVocabulary) -> LevelDrafter:
    return load(folder, target).within(vocabulary)


def decoder_of(
    folder: Path, model: nn.Module, vocabulary: DraftVocabulary, params: SamplingParams = GREEDY
) -> Decoder:
    return decoder_with(partial(restricted, vocabulary=vocabulary), folder, model, SHAPE, params)


def test_the_most_frequent_tokens_come_first_and_then_the_lowest_ids() -> None:
    counts = np.zeros(10, np.int64)
    counts[[7, 3, 9]] = 5, 2, 1
    for size, tokens in ((2, [3, 7]), (3, [3, 7, 9]), (5, [0, 1, 3, 7, 9]), (10, [*range(10)])):
        assert tokens_of(DraftVocabulary.most_frequent(size, counts)) == tokens


@BOTH
def test_greedy_and_sampled_texts_are_the_targets(
    vocabulary: DraftVocabulary, model: nn.Module, head: Path
) -> None:
    decoder = decoder_of(head, model, vocabulary)
    assert run(decoder, 30)[0] == plain_tokens(model, PROMPT, 30)
    sampled = SamplingParams(1.0)
    decoder = decoder_of(head, model, vocabulary, sampled)
    assert run(decoder, 30, 7)[0] == run(Decoder(decoder.target, None, PLAIN, sampled), 30, 7)[0]


@BOTH
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0)], ids=lambda p: p.method)
def test_sequences_of_a_batch_say_what_they_would_alone(
    params: SamplingParams, vocabulary: DraftVocabulary, model: nn.Module, head: Path
) -> None:
    rows_accept_what_they_would_alone(decoder_of(head, model, vocabulary, params), 3, params)


@BOTH
def test_what_is_drafted_or_drawn_is_in_the_vocabulary(
    vocabulary: DraftVocabulary, model: nn.Module, head: Path
) -> None:
    drafter = restricted(head, Target(model), vocabulary)
    rng, allowed = np.random.default_rng(0), {*tokens_of(vocabulary)}
    text, features = rng.integers(0, VOCAB, 9).tolist(), rng.normal(size=(8, HIDDEN))
    memory = drafter.extend(drafter.empty(1), seen(text, features, 0, 5, 6))
    here = seen(text, features, 5, 3, 4)
    beams, _ = drafter.draft(memory, here, SHAPE)
    keys = mx.random.split(mx.random.key(1), 1)
    drawn, _ = drafter.draw(memory, here, SHAPE, keys, SamplingParams(1.0, accept="rejection"))
    nodes = zip(drawn.tree.tokens[0].tolist(), drawn.tree.parents[0].tolist(), strict=True)
    for found in (
        {*beams.tokens[0, :, 1:].flatten().tolist()},
        {token for token, parent in nodes if parent >= 0},
    ):
        assert len(found) > 3
        assert found <= allowed


def sample_of(form: str, folder: Path) -> tuple[Target, LevelDrafter, int]:
    """Return a target, a drafter of a form, and the size of the features that are recorded."""
    if form == "MTP":
        model = target_model()
        target = Target(model)
        return target, load(write_head(folder / "d", random_head(model)), target), HIDDEN
    model = byte_model(num_hidden_layers=eagle_samples.LAYERS, tie_word_embeddings=False)
    target = Target(model)
    if form == "Medusa":
        config = MedusaConfig(HIDDEN, VOCAB, 3, 1, True, "target", VOCAB)
        save_medusa(MedusaNetwork(config), folder / "d", {})
        return target, DrafterFolder(folder / "d").load(target), HIDDEN
    sample = block_samples.TRAINED[form]
    tensors = block_samples.random_tensors(sample)
    drafter = block_samples.load(block_samples.write_files(folder / "d", sample, tensors), target)
    return target, drafter, (sample.features + 1) * HIDDEN


FORMS = pytest.mark.parametrize("form", ["MTP", "Medusa", *block_samples.TRAINED])


def second_level(drafter: LevelDrafter, features: np.ndarray) -> Callable[[mx.array], mx.array]:
    """Return the logits of the second level as a function of the tokens before it, [1, W]."""
    text = np.random.default_rng(0).integers(0, VOCAB, 9).tolist()
    memory = drafter.extend(drafter.empty(1), replace(seen(text, features, 0, 5, 6), start=0))
    here = seen(text, features, 5, 3, 4)
    uncompiled = drafter.uncompiled()

    def logits(tokens: mx.array) -> mx.array:
        levels = uncompiled.levels(memory, here, 2)
        levels.first()
        return levels.following(mx.zeros_like(tokens), tokens)

    return logits


@FORMS
@BOTH
def test_scores_of_the_vocabulary_are_those_of_all_tokens(
    vocabulary: DraftVocabulary, form: str, tmp_path: Path
) -> None:
    _, drafter, width = sample_of(form, tmp_path)
    features, before = np.random.default_rng(1).normal(size=(8, width)), mx.array([[5, 60]])
    want = vocabulary.of_tokens(second_level(drafter, features)(before))
    got = second_level(drafter.within(vocabulary), features)(before)
    assert got.shape == want.shape == (1, 2, vocabulary.size)
    both = np.isfinite(np.array(want)) & np.isfinite(np.array(got))  # DFlash 2 scores seven
    assert both.any(axis=-1).all()
    np.testing.assert_allclose(np.array(got)[both], np.array(want)[both], atol=1e-5)
    assert np.isfinite(np.array(got)).sum() >= np.isfinite(np.array(want)).sum()


@FORMS
@BOTH
def test_only_the_rows_of_the_vocabulary_are_read(
    vocabulary: DraftVocabulary, form: str, tmp_path: Path
) -> None:
    """Of a level, or where operations of its layers cannot be listed, of its output layer."""
    _, drafter, width = sample_of(form, tmp_path)
    features, fewer = np.random.default_rng(1).normal(size=(8, width)), drafter.within(vocabulary)

    def reads(drafter: LevelDrafter, size: int) -> int:
        """Return how many matrices of `size` rows are read."""
        if (rows := getattr(drafter, "rows", None)) is not None:
            return touching(size * HIDDEN, rows.logits, mx.zeros((1, 2, HIDDEN)))[0]
        return touching(size * HIDDEN, second_level(drafter, features), mx.array([[5, 60]]))[0]

    assert (reads(drafter, VOCAB), reads(drafter, vocabulary.size)) == (1, 0)
    assert (reads(fewer, VOCAB), reads(fewer, vocabulary.size)) == (0, 1)


@FORMS
def test_a_level_is_assumed_to_cost_less_and_is_timed_by_itself(form: str, tmp_path: Path) -> None:
    _, drafter, _ = sample_of(form, tmp_path)
    costs = [d.level_cost + d.block_cost for d in (drafter, drafter.within(FIRST))]
    less = drafter.within(DraftVocabulary(9, VOCAB))
    assert less.level_cost + less.block_cost < costs[1] < costs[0]
    assert len({drafter.timing_key, drafter.within(FIRST).timing_key, less.timing_key}) == 3


def test_the_first_rows_are_no_copy_quantised_or_not() -> None:
    for bits, tied in ((None, False), (None, True), (4, False), (4, True)):
        model = random_model(vocab_size=8192, hidden_size=64, tie_word_embeddings=tied)
        if bits is not None:
            nn.quantize(model, 32, bits)
        mx.eval(model.parameters())
        target, size = Target(model), 4096
        hidden = mx.random.normal((1, 2, 64), key=mx.random.key(0))
        before = mx.get_active_memory()
        held = target.output_rows(slice(size)), target.logits_of(slice(size))
        assert mx.get_active_memory() - before < target.output_bytes // 20
        for rows in held:
            np.testing.assert_allclose(
                rows(hidden), target.logits(hidden)[..., :size], rtol=1e-4, atol=1e-5
            )


@pytest.fixture(scope="module")
def folder(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hub") / "tiny-qwen", model)


@pytest.mark.parametrize("more", [(), ("--temperature", "1", "--seed", "4")], ids=len)
def test_what_is_typed_says_what_plain_decoding_says(
    more: tuple[str, ...], folder: Path, cli: CommandLine
) -> None:
    plain = generated(cli, folder, "none", *more)
    restricted = (*more, *TYPED, "--draft-vocab", "100", "--drafter-bits", "8")
    for drafter in ("mtp", "auto"):
        drafted = generated(cli, folder, drafter, *restricted)
        assert drafted["token_ids"] == plain["token_ids"]
        assert drafted["shapes"][0]["width"] == 2


def test_answers_with_grammars_say_what_plain_ones_do(folder: Path) -> None:
    redrafter = redrafter_mlx.load(folder, "mtp", draft_vocab=100, warm_up=False)
    grammars_say_what_plain_answers_say(redrafter)


def test_the_tokens_of_kept_answers_are_drafted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))

    def drafted() -> list[int]:
        drafter = redrafter_mlx.load(folder, "mtp", draft_vocab=3, warm_up=False).drafter
        assert isinstance(drafter, LevelDrafter)
        return tokens_of(drafter.vocabulary)

    assert drafted() == [0, 1, 2]
    store = TextStore(LearningFolder.of(load_target(folder).source.fingerprint).texts)
    store.append(KeptText((7, 7, 7), (200, 90, 90, 200, 5, 90)))
    store.append(KeptText((7, 7, 7), (5, 200, VOCAB + 3)))  # of another vocabulary
    store.append(KeptText((7, 7, 7), ()))
    assert drafted() == [5, 90, 200]


@pytest.mark.parametrize("size", ["0", "-3", "259", "many"])
def test_a_wrong_number_of_tokens_is_one_line(size: str, folder: Path, cli: CommandLine) -> None:
    typed = ["generate", "--model", str(folder), "--drafter", "mtp", "-p", "Hi", "--draft-vocab"]
    err = cli.error(*typed, size, status=2 if size == "many" else 1)
    assert size in err
    assert "vocab" in err


def test_drafters_with_an_output_layer_of_their_own_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    config = MedusaConfig(HIDDEN, VOCAB, 2, 1, True, "own", VOCAB)
    save_medusa(MedusaNetwork(config), tmp_path / "heads", {})
    for drafter in (tmp_path / "heads", folder, f"mtp+{folder}"):
        with pytest.raises(BadInputError, match=r"draft_vocab is 100.*leave"):
            redrafter_mlx.load(folder, drafter, draft_vocab=100)
    own = DrafterFolder(tmp_path / "heads").bind(Target(target_model()), byte_tokenizer())
    with pytest.raises(BadInputError, match="draft_vocab"):
        redrafter_mlx.load(folder, own, draft_vocab=100)
