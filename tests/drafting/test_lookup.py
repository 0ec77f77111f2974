"""Prompt lookup: the matches, the drafts made of them, and that output stays exact."""

from __future__ import annotations

import math
import random
import tracemalloc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from decoding import SHAPES, counted_reads, run
from tiny import byte_model, byte_tokenizer, plain_tokens, random_drafter, random_model

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.sequence import Drafted, FixedPolicy, Sequence
from redrafter_mlx.decoding.state import continuation_beams, continuation_tree
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.drafting.untrained.continuation import Continuation
from redrafter_mlx.drafting.untrained.ngram import Lookup, NgramIndex
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.target_model.model import Target

GREEDY = SamplingParams()
LOOKUP = Lookup()


def found(text: list[int], lookup: Lookup, W: int, drafts: int) -> list[tuple[int, list[int]]]:
    """Return the length and continuation of the W best earlier matches, by exhaustive search."""
    longest, everything = len(lookup.accepted), []
    for place in range(len(text) - 1):
        alike = 0
        while alike < longest and alike <= place and text[place - alike] == text[-1 - alike]:
            alike += 1
        continued = list(text)
        for i in range(drafts):  # drafts are appended, so that a loop continues
            continued.append(continued[place + 1 + i])
        everything.append((alike, place, continued[len(text) :]))
    best: list[tuple[int, list[int]]] = []
    for alike, _, tokens in sorted(everything, key=lambda one: (-one[0], -one[1])):
        if alike >= lookup.shortest and tokens not in [t for _, t in best]:
            best.append((alike, tokens))
    return best[:W]


@pytest.mark.parametrize("seed", range(60))
def test_copies_equal_a_slow_search_for_what_followed(seed: int) -> None:
    rng = random.Random(seed)
    W, count, longest = rng.randrange(1, 5), rng.randrange(1, 8), rng.randrange(1, 6)
    rates = tuple(0.9 - 0.1 * i for i in range(longest))[::-1]
    lookup = Lookup(rng.randrange(1, longest + 1), rates)
    vocab = rng.choice([2, 3, 8, 50])
    text = [rng.randrange(vocab) for _ in range(rng.randrange(1, 90))]
    copies = NgramIndex(lookup, text).continuations(W, count)
    want = found(text, lookup, W, count)
    assert [list(copy.tokens) for copy in copies] == [tokens for _, tokens in want]
    for number, (copy, (alike, _)) in enumerate(zip(copies, want, strict=True)):
        each = [rates[min(alike + i, longest) - 1] for i in range(count)]
        scores = number * math.log(lookup.second) + np.cumsum(np.log(each))
        np.testing.assert_allclose(copy.log_probs, scores, rtol=1e-5)


def test_the_latest_match_wins_among_equally_long_ones_and_a_longer_one_among_all() -> None:
    text = [1, 2, 3, 9, 2, 4, 8, 2, 5, 7, 1, 2]
    copies = NgramIndex(Lookup(shortest=1), text).continuations(3, 1)
    assert [copy.tokens for copy in copies] == [(3,), (5,), (4,)]


def test_the_best_match_is_the_latest_of_the_longest_and_costs_no_search() -> None:
    """Against a search of all earlier positions; also where thousands of them match."""
    rng = random.Random(0)
    for vocabulary, size in ((2, 60), (4, 200), (30, 400)):
        text = [rng.randrange(vocabulary) for _ in range(size)]
        index = NgramIndex(LOOKUP, text[:5])
        for at in range(5, size):
            found = index.continuations(1, 3)
            best = (0, -1)
            for end in range(1, at - 1):
                n = 0
                while n < 8 and end - n >= 0 and text[end - n] == text[at - 1 - n]:
                    n += 1
                best = max(best, (n, end))
            if best[0] < LOOKUP.shortest:
                assert found == []
            else:
                (copy,) = found
                after = [text[best[1] + 1 + i % (at - 1 - best[1])] for i in range(3)]
                matched = len(LOOKUP.accepted) if copy.limit is None else copy.limit // 2
                assert (matched, list(copy.tokens)) == (best[0], after)
            index.extend([text[at]])

    class Counted(list[int]):
        read = 0

        def __getitem__(self, key: object) -> Any:
            Counted.read += 1
            return super().__getitem__(key)  # type: ignore[index]

    index = NgramIndex(LOOKUP, [1, 2, 3] * 3000)
    index.tokens = Counted(index.tokens)
    index.extend([1, 2, 3])
    assert index.continuations(1, 3)
    assert Counted.read < 60


@pytest.mark.parametrize("shortest", [2, 3])
def test_an_index_takes_no_more_memory_than_is_reserved_for_it(shortest: int) -> None:
    """Also in a text whose n-grams hardly repeat."""
    rng = random.Random(0)
    text = [rng.randrange(49_152) for _ in range(20_000)]
    tracemalloc.start()
    index = NgramIndex(Lookup(shortest), text)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index.tokens) == len(text)
    assert held / len(text) <= Lookup.bytes_per_token


def test_a_loop_is_drafted_to_any_length() -> None:
    (copy,) = NgramIndex(LOOKUP, [9, 1, 2, 3, 1, 2, 3]).continuations(1, 7)
    assert copy.tokens == (1, 2, 3, 1, 2, 3, 1)


def test_an_index_learns_how_far_the_matches_of_its_text_hold() -> None:
    """The same two tokens are followed by a different token each time, or always by the same."""
    fickle = NgramIndex(LOOKUP, [])
    for i in range(60):
        fickle.extend([1, 2, 10 + i])
    steady = NgramIndex(LOOKUP, [1, 2, 3] * 20)
    steady.extend([1, 2, 3] * 20)
    for index, bound in ((fickle, (0.0, 0.3)), (steady, (0.9, 1.0))):
        index.extend([1, 2])
        (copy, *_) = index.continuations(1, 1)
        assert bound[0] <= copy.expected <= bound[1]


def drafters(target: Target) -> list[Drafter | None]:
    return [None, random_drafter().bind(target)]


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_equal_autoregression(shape: BeamShape) -> None:
    """A tiny model soon loops, so copies are accepted; a random drafter's drafts seldom are."""
    model = random_model()
    target = Target(model)
    want = plain_tokens(model, [3, 5, 7], 60)
    for used in drafters(target):
        decoder = Decoder(target, used, shape, GREEDY, host_drafters=(LOOKUP,))
        emitted, results = run(decoder, [3, 5, 7], 60)
        assert emitted == want
        assert any(r.from_host for r in results) == (shape.length > 1)
        assert max(len(r.tokens) for r in results) > 1 or shape.length == 1
        assert all(r.nodes <= shape.nodes for r in results)


@pytest.mark.parametrize("shape", [BeamShape(1, 4), BeamShape(3, 4)])
@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(0.8, top_p=0.9), SamplingParams(0.8, accept="rejection")]
)
def test_a_step_with_copies_reads_no_more_on_the_host(
    shape: BeamShape, sampling: SamplingParams
) -> None:
    """Only the one report of every step is read."""
    target = Target(random_model())
    for used in drafters(target):
        decoder = Decoder(target, used, shape, sampling, host_drafters=(LOOKUP,))
        with counted_reads() as counts:
            _, results = run(decoder, [1, 2, 3, 1, 2], 40)
        assert counts == {"tolist": len(results)}


def test_a_seed_gives_the_same_text_with_copies_and_without() -> None:
    target = Target(random_model(vocab_size=12))
    sampling = SamplingParams(0.9, top_p=0.95)
    drafter = random_drafter(vocab_size=12).bind(target)
    want, _ = run(Decoder(target, None, PLAIN, sampling), [3, 5, 7], 80, seed=4)
    for shape in (BeamShape(1, 5), BeamShape(3, 4), BeamShape(4, 4, 6)):
        for used in (None, drafter):
            decoder = Decoder(target, used, shape, sampling, host_drafters=(LOOKUP,))
            emitted, results = run(decoder, [3, 5, 7], 80, seed=4)
            assert emitted == want
            assert max(len(r.tokens) for r in results if r.from_host) > 1


@pytest.mark.parametrize("accept", ["sample", "rejection"])
def test_copies_are_verified_by_every_lossless_method(accept: str) -> None:
    """A drafter next to prompt lookup displaces no copy, even if drafts are drawn for rejection."""
    model = random_model(vocab_size=12)
    target = Target(model)
    sampling = SamplingParams(0.2, accept=accept)  # certain enough to repeat itself
    drafter = random_drafter(vocab_size=12).bind(target)
    decoder = Decoder(target, drafter, BeamShape(3, 4), sampling, host_drafters=(LOOKUP,))
    _, results = run(decoder, [3, 5, 7], 80, seed=1)
    copied = [r for r in results if r.from_host]
    assert sum(len(r.tokens) - 1 for r in copied) > len(copied)


def test_certain_drafts_are_sampled_where_rejection_is_asked_for() -> None:
    """A draft of probability 1 is accepted as often as a sample of the target equals it."""
    target = Target(random_model(vocab_size=12))
    texts = []
    for accept in ("sample", "rejection"):
        sampling = SamplingParams(0.9, accept=accept)
        decoder = Decoder(target, None, BeamShape(3, 4), sampling, host_drafters=(LOOKUP,))
        texts.append(run(decoder, [3], 60)[0])
    assert texts[0] == texts[1]


def test_a_text_without_repeats_has_no_drafts() -> None:
    decoder = Decoder(
        Target(random_model()), None, BeamShape(3, 4), GREEDY, host_drafters=(Lookup(5),)
    )
    _, results = run(decoder, [1, 2, 3, 4, 5], 4)
    assert all(r.nodes == 1 and not r.from_host for r in results)


def line(tokens: list[int], score: float) -> Beams:
    """Return one candidate; each further draft changes its log probability by `score`."""
    scores = [score * i for i in range(len(tokens))]
    return Beams(mx.array([[tokens]]), mx.array([[scores]], mx.float32))


def copies_of(text: list[int], shape: BeamShape) -> Beams:
    """Return the beams that an index proposes after a text."""
    return continuation_beams(
        [NgramIndex(LOOKUP, text).continuations(1, shape.length - 1)], text[-1:], shape
    )


@pytest.mark.parametrize(("sure", "kept"), [(-0.01, {40, 41}), (-9.0, {7, 8})])
def test_a_mixed_tree_keeps_the_likelier_branches(sure: float, kept: set[int]) -> None:
    """There is room for two drafts: those with the higher probability are kept."""
    shape = BeamShape(2, 3, 3)
    copies = copies_of([5, 6, 7, 8, 5, 6], shape)
    tree, _ = continuation_tree(copies, shape, line([6, 40, 41], sure))
    assert {*tree.tokens[0, 1:].tolist()} == kept


@pytest.mark.parametrize(("sure", "first"), [(-0.05, 40), (-3.0, 7)])
def test_a_single_beam_is_the_one_that_promises_more(sure: float, first: int) -> None:
    """A match of two tokens gives 7 a probability of about one half."""
    shape = BeamShape(1, 3)
    copies = copies_of([5, 6, 7, 8, 5, 6], shape)
    tree, _ = continuation_tree(copies, shape, line([6, 40, 41], sure))
    assert tree.is_chain
    assert tree.tokens[0, 1].item() == first


def test_a_copy_may_be_longer_than_the_drafters_candidates() -> None:
    shape = BeamShape(2, 6)
    copies = copies_of([5, 6, 7, 8, 9, 10, 11, 5, 6], shape)
    tree, _ = continuation_tree(copies, shape, line([6, 40, 41], -0.1))
    depths = dict(zip(tree.tokens[0].tolist(), tree.depths[0].tolist(), strict=True))
    assert (depths[41], depths[11]) == (2, 5)
    assert int(mx.sum(tree.valid)) == 8


def test_rows_without_a_match_have_no_nodes_of_copies() -> None:
    copies = [[Continuation((7, 8), (-0.1, -0.2), "short match")], []]
    tree, _ = continuation_tree(
        continuation_beams(copies, [1, 2], BeamShape(2, 3)), BeamShape(2, 3), None
    )
    assert mx.sum(tree.valid, axis=1).tolist() == [3, 1]
    assert tree.tokens[:, 0].tolist() == [1, 2]


def test_drawn_drafts_give_way_only_to_copies_that_promise_more_than_they_have_brought() -> None:
    index, shape = NgramIndex(LOOKUP, [1, 2, 3, 4, 1, 2]), BeamShape(2, 4)
    (copy,) = index.continuations(1, 3)
    for accepted, gives_way in ((0, True), (3, False)):
        fixed, row = FixedPolicy(shape), Sequence(lambda _: False, len(index.tokens), (index,))
        step = type("Step", (), {"from_host": False, "path": [0] * (accepted + 1)})()
        for _ in range(20):
            fixed.learn([row], [step])  # type: ignore[list-item]
        (plan,) = fixed.revise([row], [Drafted(shape, True)])
        assert (plan is not None) == gives_way
        assert plan is None or (not plan.join and [*plan.continuations] == [copy])


def test_a_session_looks_up_what_earlier_turns_said() -> None:
    """The searched text is the whole conversation, although only the new turn's tokens are read."""
    drafted = Redrafter(byte_model(seed=2), byte_tokenizer(), host_drafters=(Lookup(),)).session()
    plain = Redrafter(byte_model(seed=2), byte_tokenizer()).session()
    for turn in ("hello there", "hello again", "hello there"):
        got = list(drafted.stream(turn, max_tokens=40))
        assert [r.token for r in got] == [r.token for r in plain.stream(turn, max_tokens=40)]
    assert got[-1].tokens_per_step > 1.5
