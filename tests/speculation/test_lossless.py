"""Which acceptance methods keep the target's distribution, by exact enumeration and chi-square.

The tests themselves are tested, too: schemes that are known to be wrong must fail.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from distributions import chi_square, critical
from joint import (
    N_TOKENS,
    PROMPT,
    ROWS,
    V,
    exact_joint,
    fits,
    small_buffers,  # noqa: F401
    tiny_target,
)
from tiny import Words, random_drafter, random_model

from redrafter_mlx.bench.measure.packing import pack_final, pack_separately
from redrafter_mlx.config import AcceptMethod, BeamShape, SamplingParams
from redrafter_mlx.decoding.sequence import Drafted
from redrafter_mlx.decoding.state import Drafts, continuation_beams, continuation_tree
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.interface import Seen
from redrafter_mlx.drafting.untrained.ngram import Lookup, NgramIndex
from redrafter_mlx.speculation import rejection
from redrafter_mlx.speculation.accept import Acceptance, up_to
from redrafter_mlx.speculation.beam_search import Levels
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.speculation.sampling import TRIAL, sampled_log_probs, sequence_keys, uniform_at
from redrafter_mlx.speculation.tree import Pack, TokenTree
from redrafter_mlx.target_model.recurrent.gated_delta import GatedDelta

LARGE_V = 16
"""Vocabulary size of the exhaustive tests: 4,096 sequences."""


pytestmark = pytest.mark.usefixtures("small_buffers")
SHAPES = [BeamShape(1, 4), BeamShape(3, 3), BeamShape(4, 2)]
FILTERS = [{}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.15}]


@pytest.mark.parametrize("accept", ["sample", "rejection"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.width}x{s.length}")
def test_lossless_methods_keep_the_targets_joint_distribution(
    accept: AcceptMethod, shape: BeamShape
) -> None:
    """Three tokens after a prompt over a vocabulary of 5: 125 sequences, 12,000 draws."""
    assert fits(shape, SamplingParams(1.0, accept=accept))


@pytest.mark.parametrize("accept", ["sample", "rejection"])
def test_lossless_methods_keep_the_joint_distribution_of_a_recurrent_target(
    accept: AcceptMethod,
) -> None:
    assert fits(BeamShape(2, 3), SamplingParams(1.0, accept=accept), 1, hybrid="qwen3_5")


def test_a_recurrent_state_that_misses_the_accepted_path_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wrong scheme: verify each tree after the prompt's state."""
    monkeypatch.setattr(
        GatedDelta,
        "commit",
        lambda self, state, tape, accepted: state,  # noqa: ARG005
    )
    assert not fits(BeamShape(2, 3), SamplingParams(1.0), 1, hybrid="qwen3_5")


@pytest.mark.parametrize("temperature", [0.5, 1.5])
@pytest.mark.parametrize("seed", [0, 7], ids=["the target itself", "hostile"])
def test_sampling_keeps_the_joint_distribution_where_drafts_know_the_noise(
    seed: int, temperature: float
) -> None:
    """The target's own drafts are all accepted, as they are its draws; those of another are not."""
    model, target = tiny_target()
    words = Words(V)
    other = random_model(seed=seed, vocab_size=V, num_hidden_layers=1)
    itself = mx.array_equal(other.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert itself.item() == (seed == 0)
    drafter = DraftModel(other, words).bind(target, words)  # type: ignore[arg-type]
    params = SamplingParams(temperature)
    assert fits(BeamShape(2, 3), params, 2, drafter)
    decoder = Decoder(target, drafter, BeamShape(2, 3), params)
    state, _ = decoder.start(decoder.new_cache(ROWS), 0, [PROMPT] * ROWS, sequence_keys(3, ROWS))
    _, output = decoder.step(state, len(PROMPT) + 1)
    accepted = np.mean([len(result.tokens) - 1 for result in output.read()])
    assert accepted == 2 if seed == 0 else accepted < 1.5


@pytest.mark.exhaustive
@pytest.mark.parametrize("pack", [pack_final, pack_separately])
def test_sampling_keeps_the_joint_distribution_with_other_packings(pack: Pack) -> None:
    assert fits(BeamShape(3, 3), SamplingParams(1.0), pack=pack)


@pytest.mark.parametrize("accept", ["sample", "rejection"])
@pytest.mark.parametrize(
    ("filters", "temperature"),
    list(zip(FILTERS, (0.5, 1.5, 0.5, 1.5), strict=True)),
    ids=("none", "top_p", "top_k", "min_p"),
)
def test_lossless_methods_keep_filtered_distributions(
    accept: AcceptMethod, filters: dict, temperature: float
) -> None:
    assert fits(BeamShape(3, 3), SamplingParams(temperature, accept=accept, **filters), 2)


def drawn_revised(
    shape: BeamShape, params: SamplingParams, drafts: bool, as_drawn: bool = False
) -> np.ndarray:
    """Return how often each sequence was decoded; every second tree consists of copies.

    as_drawn: treat the copies as if they had been drawn from the drafter's distribution
    """
    _, target = tiny_target()
    drafter = random_drafter(vocab_size=V).bind(target) if drafts else None
    decoder = Decoder(target, drafter, shape, params)
    counts = np.zeros((V,) * N_TOKENS)
    for batch in range(3):
        keys = sequence_keys(batch, ROWS)
        state, output = decoder.start(decoder.new_cache(ROWS), 0, [PROMPT] * ROWS, keys)
        emitted = [r.tokens for r in output.read()]
        indexes = [NgramIndex(Lookup(1), [*PROMPT, *row]) for row in emitted]
        for step in itertools.count():
            if min(map(len, emitted)) >= N_TOKENS:
                break
            if step % 2 == 0:
                copies = [index.continuations(shape.width, shape.length - 1) for index in indexes]
                beams = continuation_beams(copies, [row[-1] for row in emitted], shape)
                tree, from_host = continuation_tree(beams, shape, state.drafts.beams)
                log_probs = state.drafts.log_probs if as_drawn else None
                made = Drafted(shape, drawn=log_probs is not None, from_host=True)
                drafts_now = Drafts(tree, (made,) * ROWS, log_probs, from_host=from_host)
                state = replace(state, drafts=drafts_now)
            state, output = decoder.step(state, len(PROMPT) + max(map(len, emitted)))
            for index, row, result in zip(indexes, emitted, output.read(), strict=True):
                row.extend(result.tokens)
                index.extend(result.tokens)
        for row in emitted:
            counts[tuple(row[:N_TOKENS])] += 1
    return counts


def fits_the_target(counts: np.ndarray) -> bool:
    expected = exact_joint(SamplingParams(1.0)) * counts.sum()
    statistic, freedom = chi_square(counts.ravel(), expected.ravel())
    return statistic < critical(freedom)


@pytest.mark.parametrize("accept", ["sample", "rejection"])
@pytest.mark.parametrize("drafts", [False, True], ids=["alone", "drafter"])
def test_lossless_methods_keep_the_joint_distribution_revised(
    accept: AcceptMethod, drafts: bool
) -> None:
    """Every token of the vocabulary may occur in the text before, and so may be copied."""
    params = SamplingParams(1.0, accept=accept)
    assert fits_the_target(drawn_revised(BeamShape(3, 3), params, drafts))


def test_copies_that_are_taken_for_drawn_ones_fail() -> None:
    """The wrong scheme: test copies as if they had come from the drafter's distribution."""
    params = SamplingParams(1.0, accept="rejection")
    assert not fits_the_target(drawn_revised(BeamShape(3, 3), params, True, as_drawn=True))


def test_rejection_keeps_the_distribution_when_the_tree_is_cut_short() -> None:
    assert fits(BeamShape(4, 4, 5), SamplingParams(1.0, accept="rejection"))


def test_rejection_keeps_the_distribution_with_a_draft_vocabulary() -> None:
    """Tokens that cannot be drafted keep their probabilities, too."""
    _, target = tiny_target()
    drafter = random_drafter(vocab_size=V, draft_vocab_size=3)
    drafter.draft_vocab = mx.array([4, 0, 2])
    params = SamplingParams(1.0, accept="rejection")
    for shape in (BeamShape(1, 3), BeamShape(3, 3)):
        assert fits(shape, params, drafter=drafter.bind(target))


def test_what_cannot_be_drafted_has_no_probability() -> None:
    drafter = random_drafter(vocab_size=V, draft_vocab_size=3)
    drafter.draft_vocab = mx.array([4, 0, 2])
    bound = drafter.bind(tiny_target()[1])
    levels = bound.levels_of(mx.zeros((1, 32)), mx.array([0]), 1)
    q = levels.vocabulary.over_vocabulary(mx.log(mx.array([[0.5, 0.25, 0.25]])))
    np.testing.assert_allclose(mx.exp(q), [[0.25, 0, 0.25, 0, 0.5]], atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("accept", ["sample", "rejection"])
@pytest.mark.parametrize("filters", FILTERS, ids=lambda f: next(iter(f), "none"))
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("W", [1, 2, 3, 4])
@pytest.mark.parametrize("L", [2, 3, 4, 5])
def test_every_shape_temperature_and_filter_with_a_hundred_thousand_draws(
    accept: AcceptMethod, filters: dict, temperature: float, W: int, L: int
) -> None:
    params = SamplingParams(temperature, accept=accept, **filters)
    assert fits(BeamShape(W, L), params, batches=25, vocabulary=LARGE_V)


def test_typical_acceptance_is_not_lossless() -> None:
    """As documented; a distribution test that it passes would be useless."""
    params = SamplingParams(1.0, accept="typical", epsilon=0.05, delta=0.5)
    assert not params.lossless
    assert not fits(BeamShape(3, 3), params)


def longest_of_independent_beams(
    drafts: rejection.SampledDrafts,
    log_probs: mx.array,
    position: mx.array,
    keys: mx.array,
    width: int,
) -> Acceptance:
    """The wrong scheme: test every node by itself, and take the longest path that passes.

    The bonus token is drawn from the residual of the path's last node, as if nothing else had
    been tried.
    """
    del width
    tree: TokenTree = drafts.tree
    B, N, vocab = log_probs.shape
    parent = mx.maximum(tree.parents, 0)
    index = parent * vocab + tree.tokens
    p = mx.exp(mx.take_along_axis(log_probs.reshape(B, N * vocab), index, axis=1))
    q = mx.exp(mx.take_along_axis(drafts.log_probs.reshape(B, N * vocab), index, axis=1))
    luck = uniform_at(keys, position[:, None], N, TRIAL)[:, 0]
    right = (luck * q < p) | (mx.arange(N)[None] == 0)
    kept = mx.all(mx.logical_not(tree.mask) | right[:, None, :], axis=2) & tree.valid
    last = mx.argmax(mx.where(kept, tree.depths, -1), axis=1)
    rows = last[:, None, None]
    target = mx.exp(mx.take_along_axis(log_probs, rows, axis=1)[:, 0])
    draft = mx.exp(mx.take_along_axis(drafts.log_probs, rows, axis=1)[:, 0])
    tried = mx.any(tree.parents == last[:, None], axis=1)[:, None]
    rest = mx.where(tried, mx.maximum(target - draft, 0), target)
    noise = -mx.log(-mx.log(uniform_at(keys, position[:, None] + 50, vocab, TRIAL)[:, 0]))
    return up_to(tree, last, mx.argmax(mx.log(rest) + noise, axis=1).astype(mx.int32))


def test_the_longest_of_independently_tested_beams_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheme of the paper's own MLX code."""
    monkeypatch.setattr(
        "redrafter_mlx.decoding.acceptance.accept_rejection", longest_of_independent_beams
    )
    assert not fits(BeamShape(3, 3), SamplingParams(1.0, accept="rejection"))


def test_drafts_drawn_before_the_filters_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejection against a q from which the drafts were not drawn."""
    honest = rejection.draw_drafts

    def unfiltered_q(*args: object) -> rejection.SampledDrafts:
        *rest, _ = args
        drafts = honest(*args)  # type: ignore[arg-type]
        plain = honest(*rest, SamplingParams(1.0, accept="rejection"))  # type: ignore[arg-type]
        return drafts._replace(log_probs=plain.log_probs)

    monkeypatch.setattr("redrafter_mlx.drafting.level_drafter.draw_drafts", unfiltered_q)
    assert not fits(BeamShape(1, 3), SamplingParams(0.5, accept="rejection", top_k=2))


def test_drafts_from_the_targets_own_distribution_are_always_accepted() -> None:
    """With q = p rejection accepts everything; sampling at the nodes does not."""
    rng = np.random.default_rng(0)
    logits = mx.array(rng.normal(size=(1, 1, V)).astype(np.float32))
    params = SamplingParams(1.0, accept="rejection")
    p = mx.broadcast_to(sampled_log_probs(logits, params), (500, 2, V))
    keys = sequence_keys(0, 500)

    class TheTargetItself(Levels):
        def first(self) -> mx.array:
            return mx.broadcast_to(logits, (500, 1, V))

        def following(self, parents: mx.array, tokens: mx.array) -> mx.array:
            raise AssertionError(f"one level was asked for, not {parents}, {tokens}")

    drafts = rejection.draw_drafts(
        TheTargetItself(DraftVocabulary(V, V)), mx.zeros((500,), mx.int32), mx.full((500,), 7),
        keys, BeamShape(1, 2), params,
    )  # fmt: skip
    got = rejection.accept_rejection(drafts, p, mx.full((500,), 8), keys, 1)
    assert got.n_accepted.tolist() == [1] * 500


@pytest.mark.parametrize("gap", [1.0, 60.0, 75.0, 100.0, 1000.0])
def test_rejection_keeps_the_distribution_whatever_a_drafter_is_sure_of(gap: float) -> None:
    """At a low temperature all drafts but the first are too unlikely for a float32."""
    rows, width = 20_000, 3
    sure = mx.broadcast_to(-gap * mx.arange(V, dtype=mx.float32), (rows, 1, V))

    class Sure(Levels):
        def first(self) -> mx.array:
            return sure

        def following(self, parents: mx.array, tokens: mx.array) -> mx.array:
            raise AssertionError(f"one level was asked for, not {parents}, {tokens}")

    params, keys = SamplingParams(1.0, accept="rejection"), sequence_keys(0, rows)
    drafts = rejection.draw_drafts(
        Sure(DraftVocabulary(V, V)), mx.zeros((rows,), mx.int32), mx.full((rows,), 7), keys,
        BeamShape(width, 2), params,
    )  # fmt: skip
    want = np.array([0.05, 0.1, 0.15, 0.3, 0.4])
    p = mx.broadcast_to(mx.log(mx.array(want)), (rows, drafts.tree.tokens.shape[1], V))
    got = rejection.accept_rejection(drafts, p, mx.full((rows,), 8), keys, width)
    counts = np.bincount(np.array(got.emitted[:, 0]), minlength=V)
    statistic, freedom = chi_square(counts, want * rows)
    assert statistic < critical(freedom)


def test_stochastic_beams_are_drawn_without_replacement() -> None:
    """Compares the frequency of each ordered pair of the root's children with q."""
    _, target = tiny_target()
    bound = random_drafter(vocab_size=V).bind(target)
    rows = 20_000
    params = SamplingParams(1.0, accept="rejection")
    context = mx.broadcast_to(mx.ones((1, target.hidden_size)) * 0.3, (rows, target.hidden_size))
    tokens, one = mx.broadcast_to(mx.array([0, 2]), (rows, 2)), mx.ones((rows,), mx.int32)
    seen = Seen(tokens, context[:, None], 8 * one, one, 9)
    drafts, _ = bound.draw((), seen, BeamShape(2, 2), sequence_keys(3, rows), params)
    pairs = np.zeros((V, V))
    for _, first, second in drafts.tree.tokens.tolist():
        pairs[first, second] += 1
    q = np.exp(np.array(drafts.log_probs[0, 0]))
    want = np.array([[q[a] * q[b] / (1 - q[a]) if a != b else 0 for b in range(V)]
                     for a in range(V)])  # fmt: skip
    statistic, freedom = chi_square(pairs.ravel(), (want * rows).ravel())
    assert statistic < critical(freedom)
