"""Drafting from the text itself: what is found, what is made of it, and that nothing is lost."""

from __future__ import annotations

import math
import random

import mlx.core as mx
import numpy as np
import pytest
from test_decode import SHAPES, counted_reads, run
from test_tree import living_paths
from tiny import byte_model, byte_tokenizer, plain_tokens, random_drafter, random_model

from redrafter_mlx import decode
from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decode import Decoder, DecodeState
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.generate import Redrafter
from redrafter_mlx.lookup import Both, Lookup, match_lengths
from redrafter_mlx.proposer import DraftInput
from redrafter_mlx.report import StepOutput, read_report
from redrafter_mlx.sampling import sequence_keys
from redrafter_mlx.target import Target
from redrafter_mlx.transcript import TEXT_STEP, begin_text, extend_text
from redrafter_mlx.tree import Beams, final_candidates

GREEDY = SamplingParams()
LOOKUP = Lookup()


def found(text: list[int], lookup: Lookup, W: int, L: int) -> list[tuple[int, list[int]]]:
    """The length and the continuation of the W best earlier occurrences of the text's end."""
    longest, everything = len(lookup.kept), []
    for place in range(len(text) - 1):
        alike = 0
        while alike < longest and alike <= place and text[place - alike] == text[-1 - alike]:
            alike += 1
        continued = list(text)
        for i in range(L - 1):  # drafts join the text, so that a loop goes on
            continued.append(continued[place + 1 + i])
        everything.append((alike, place, continued[len(text) :]))
    best: list[tuple[int, list[int]]] = []
    for alike, _, drafts in sorted(everything, key=lambda one: (-one[0], -one[1])):
        if alike >= lookup.shortest and drafts not in [d for _, d in best]:
            best.append((alike, drafts))
    return best[:W]


def proposed(texts: list[list[int]], lookup: Lookup, shape: BeamShape) -> Beams:
    """What a lookup proposes behind rows of different length, with rubbish behind their ends."""
    text = begin_text(texts)
    behind = mx.arange(text.shape[1])[None] >= mx.array([[len(t)] for t in texts])
    text = mx.where(behind, texts[0][-1], text)
    root = mx.array([t[-1] for t in texts])
    position = mx.array([len(t) - 1 for t in texts])
    return lookup.propose(DraftInput(mx.zeros((len(texts), 4)), root, position, text), shape)


def test_matches_of_a_drawn_text() -> None:
    """The example in `match_lengths`."""
    a, b, c = 5, 6, 7
    text = mx.array([[a, b, c, a, b, a, b, 0]])
    assert match_lengths(text, mx.array([4]), 4).tolist() == [[0, 2, 0, 0, 0, 0, 0, 0]]


def test_the_last_match_wins_among_equally_long_ones_and_a_longer_one_among_all() -> None:
    beams = proposed([[1, 2, 3, 9, 2, 4, 8, 2, 5, 7, 1, 2]], LOOKUP, BeamShape(3, 2))
    assert beams.tokens[0].tolist() == [[2, 3], [2, 5], [2, 4]]


def test_a_loop_is_drafted_to_any_length() -> None:
    beams = proposed([[9, 1, 2, 3, 1, 2, 3]], LOOKUP, BeamShape(1, 8))
    assert beams.tokens[0, 0].tolist() == [3, 1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("seed", range(60))
def test_drafts_equal_a_slow_search_for_what_followed(seed: int) -> None:
    rng = random.Random(seed)
    W, L = rng.randrange(1, 5), rng.randrange(2, 8)
    longest = rng.randrange(1, 6)
    lookup = Lookup(
        rng.randrange(1, longest + 1), tuple(0.9 - 0.1 * i for i in range(longest))[::-1]
    )
    vocab = rng.choice([2, 3, 8, 50])
    texts = [
        [rng.randrange(vocab) for _ in range(rng.randrange(1, 90))]
        for _ in range(rng.randrange(1, 4))
    ]
    beams = proposed(texts, lookup, BeamShape(W, L))
    assert beams.tokens.shape == beams.log_probs.shape == (len(texts), W, L)
    for b, text in enumerate(texts):
        want = found(text, lookup, W, L)
        for w in range(W):
            scores = beams.log_probs[b, w].tolist()
            assert (beams.tokens[b, w, 0].item(), scores[0]) == (text[-1], 0)
            if w >= len(want):
                assert scores[1:] == [-math.inf] * (L - 1)
                continue
            alike, drafts = want[w]
            assert beams.tokens[b, w, 1:].tolist() == drafts
            rates = [lookup.kept[min(alike + i, longest) - 1] for i in range(L - 1)]
            want_scores = w * math.log(lookup.second) + np.cumsum(np.log(rates))
            np.testing.assert_allclose(scores[1:], want_scores, rtol=1e-5)
        # The tree's own condition, prefixes that candidates share included.
        score = living_paths(beams.tokens[b].tolist(), beams.log_probs[b].tolist())
        assert all(score[p] <= score[p[:-1]] for p in score if len(p) > 1)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_text_holds_what_was_emitted_as_its_buffer_grows(batch: int) -> None:
    rng = random.Random(batch)
    said = [[rng.randrange(50) for _ in range(rng.randrange(1, 9))] for _ in range(batch)]
    text = begin_text(said)
    for _ in range(400):
        start = [len(row) for row in said]
        L = rng.randrange(1, 6)
        emitted = [[rng.randrange(50) for _ in range(L)] for _ in range(batch)]
        text = extend_text(text, mx.array(emitted), mx.array(start), max(start))
        for row, new in zip(said, emitted, strict=True):
            row.extend(new[: rng.randrange(1, L + 1)])
    assert max(map(len, said)) > 2 * TEXT_STEP
    assert text.shape[1] % TEXT_STEP == 0
    for b, row in enumerate(said):
        assert text[b, : len(row)].tolist() == row


def both(target: Target) -> Both:
    return Both(random_drafter().bind(target), LOOKUP)


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_equal_autoregression(shape: BeamShape) -> None:
    """A tiny model soon loops, so lookups are accepted; a random drafter's almost never are."""
    model = random_model()
    target = Target(model)
    want = plain_tokens(model, [3, 5, 7], 60)
    for proposer in (LOOKUP, both(target)):
        said, results = run(Decoder(target, proposer, shape, GREEDY), [3, 5, 7], 60)
        assert said == want
        looked_up = shape.length > 1 and (shape.width > 1 or proposer is LOOKUP)
        assert max(len(r.tokens) for r in results) > 1 or not looked_up


def test_final_candidates_keep_those_that_end_early() -> None:
    """A drafter's candidates end before a lookup's, and are candidates all the same."""
    model = random_model()
    target = Target(model)
    mixed = Both(random_drafter().bind(target), LOOKUP, longest=3)
    shape = BeamShape(4, 6)
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    given = DraftInput(mx.ones((1, 32)), mx.array([2]), mx.array([8]), begin_text([text]))
    final = final_candidates(mixed.propose(given, shape))
    ends = mx.sum(final.log_probs > -mx.inf, axis=2)[0].tolist()
    assert sorted(ends)[-1] == 6, "the lookup's"
    assert 3 in ends, "the drafter's"
    want = plain_tokens(model, [3, 5, 7], 60)
    said, results = run(Decoder(target, mixed, shape, GREEDY, prefixes="final"), [3, 5, 7], 60)
    assert said == want
    assert max(len(r.tokens) for r in results) > 1


@pytest.mark.parametrize("proposer", ["lookup", "both"])
def test_rows_of_a_batch_are_drafted_as_if_alone_and_the_text_is_what_they_said(
    proposer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several edges of the text's buffer, rows at different places."""
    monkeypatch.setattr("redrafter_mlx.transcript.TEXT_STEP", 8)
    model = random_model()
    target = Target(model)
    decoder = Decoder(target, LOOKUP if proposer == "lookup" else both(target), BeamShape(3, 4),
                      GREEDY)  # fmt: skip
    prompts = [[3, 5, 7], [11, 13, 17, 19, 23], [4] * 6]
    state, output = decoder.start(target.new_cache(), 0, prompts, sequence_keys(0, 3))
    said = [list(r.tokens) for r in read_report(output)]
    for _ in range(25):
        state, output = decoder.step(state, int(max(state.length.tolist())))
        for row, result in zip(said, read_report(output), strict=True):
            row.extend(result.tokens)
        assert state.text is not None
        for b, (prompt, row) in enumerate(zip(prompts, said, strict=True)):
            text = prompt + row
            assert state.length[b].item() == len(text) - 1
            assert state.text[b, : len(text)].tolist() == text
    for prompt, row in zip(prompts, said, strict=True):
        assert row == plain_tokens(model, prompt, len(row))
    assert len({len(row) for row in said}) > 1


def test_the_text_is_kept_only_for_proposers_that_read_it() -> None:
    target = Target(random_model())
    drafter = random_drafter().bind(target)
    for proposer, kept in ((None, False), (drafter, False), (LOOKUP, True), (both(target), True)):
        decoder = Decoder(target, proposer, BeamShape(2, 3), GREEDY)
        state, _ = decoder.start(target.new_cache(), 0, [[1, 2, 3]], sequence_keys(0))
        state, _ = decoder.step(state, 3)
        assert (state.text is not None) == kept


@pytest.mark.parametrize("shape", [BeamShape(1, 4), BeamShape(3, 4)])
@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(0.8, top_p=0.9), SamplingParams(0.8, accept="rejection")]
)
def test_a_step_reads_nothing_on_the_host(
    shape: BeamShape, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Growing the text's buffer included."""
    monkeypatch.setattr("redrafter_mlx.transcript.TEXT_STEP", 8)
    target = Target(random_model())
    for proposer in (LOOKUP, both(target)):
        decoder = Decoder(target, proposer, shape, sampling)
        state, _ = decoder.start(target.new_cache(), 0, [[1, 2, 3]], sequence_keys(0))
        with counted_reads() as counts:
            for i in range(8):
                state, _ = decoder.step(state, 3 + i * shape.length)
        assert counts == {}


def test_a_seed_gives_the_same_text_with_lookups_and_without() -> None:
    target = Target(random_model(vocab_size=12))
    sampling = SamplingParams(0.9, top_p=0.95)
    drafter = random_drafter(vocab_size=12).bind(target)
    want, _ = run(Decoder(target, None, BeamShape(1, 1), sampling), [3, 5, 7], 80, seed=4)
    for shape in (BeamShape(1, 5), BeamShape(3, 4), BeamShape(4, 4, 6)):
        for proposer in (LOOKUP, Both(drafter, LOOKUP)):
            said, results = run(Decoder(target, proposer, shape, sampling), [3, 5, 7], 80, seed=4)
            assert said == want
            assert max(len(r.tokens) for r in results) > 1


def test_certain_drafts_are_sampled_where_rejection_is_asked_for() -> None:
    """A test of a certain draft keeps it as often as a draw of the target falls on it."""
    target = Target(random_model(vocab_size=12))
    texts = [
        run(Decoder(target, LOOKUP, BeamShape(3, 4), SamplingParams(0.9, accept=accept)), [3], 60)
        for accept in ("sample", "rejection")
    ]  # fmt: skip
    assert texts[0][0] == texts[1][0]


def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    model = random_model()
    target = Target(model)
    prompt = [3, 5, 7]
    want = plain_tokens(model, prompt, 200)
    said, results = run(Decoder(target, LOOKUP, BeamShape(1, 6), GREEDY), prompt, 200)
    assert said == want
    assert len(said) / (len(results) - 1) > 1.5


def test_a_text_without_repeats_has_no_drafts() -> None:
    """The tree is its root alone, whatever its capacity."""
    model = random_model()
    target, prompt = Target(model), [1, 2, 3, 4, 5]
    assert plain_tokens(model, prompt, 1)[0] not in prompt, "the first token repeats none either"
    for shape in (BeamShape(1, 4), BeamShape(3, 4)):
        decoder = Decoder(target, LOOKUP, shape, GREEDY)
        state, _ = decoder.start(target.new_cache(), 0, [prompt], sequence_keys(0))
        assert state.drafts.tree.valid.tolist() == [[True] + [False] * (shape.nodes - 1)]


class Echo:
    """Proposes the same candidate always, and is sure of it."""

    reads_text = False
    reads_context = ()
    reads_layers = ()

    def __init__(self, drafts: list[int], score: float) -> None:
        self._drafts, self._score = drafts, score

    def propose(self, given: DraftInput, shape: BeamShape) -> Beams:
        B, W, L = given.root.shape[0], shape.width, shape.length
        line = mx.array([0, *self._drafts[: L - 1]])
        tokens = mx.broadcast_to(line, (B, W, L))
        first = mx.arange(L)[None, None] == 0
        scores = mx.where(first, 0.0, self._score) - mx.arange(W)[None, :, None] * (1 - first)
        tokens = mx.where(first, given.root[:, None, None], tokens + mx.arange(W)[None, :, None])
        return Beams(tokens, mx.broadcast_to(scores, tokens.shape))

    def draw(self, *_: object) -> object:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("sure", "kept"), [(-0.01, [[6, 40], [6, 40, 41]]), (-9.0, [[6, 7], [6, 7, 8]])]
)
def test_a_mixed_tree_keeps_the_likelier_branches(sure: float, kept: list[list[int]]) -> None:
    """Room for two drafts: those of the side that is surer."""
    text = [6, 7, 8, 5, 6]
    mixed = Both(Echo([40, 41], sure), LOOKUP)  # type: ignore[arg-type]
    given = DraftInput(mx.zeros((1, 4)), mx.array([6]), mx.array([4]), begin_text([text]))
    beams = mixed.propose(given, BeamShape(2, 3))
    assert beams.tokens[0].tolist() == sorted([[6, 40, 41], [6, 7, 8]], reverse=sure > -1)
    tree = decode.pack_beam(beams, 3)
    paths = living_paths(beams.tokens[0].tolist(), beams.log_probs[0].tolist())
    best = sorted((p for p in paths if len(p) > 1), key=lambda p: (-paths[p], len(p)))[:2]
    assert [list(p) for p in best] == kept
    assert sorted(tree.tokens[0, 1:].tolist()) == sorted(p[-1] for p in kept)


def test_beams_are_shared_between_drafter_and_lookup() -> None:
    """Half for the lookup, rounded down, at most two; the widths always add up."""
    text = begin_text([[1, 2, 1, 3, 1, 4, 1, 5, 1]])
    given = DraftInput(mx.zeros((1, 4)), mx.array([1]), mx.array([8]), text)
    mixed = Both(Echo([40, 41], -1.0), LOOKUP)  # type: ignore[arg-type]
    for width, looked_up in ((1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (8, 2)):
        tokens = mixed.propose(given, BeamShape(width, 3)).tokens
        assert tokens.shape == (1, width, 3)
        assert sum(row[1] < 40 for row in tokens[0].tolist()) == looked_up


@pytest.mark.parametrize(("sure", "first"), [(-0.05, 40), (-3.0, 7)])
def test_a_single_beam_is_the_one_that_promises_more(sure: float, first: int) -> None:
    """Two matching tokens speak for 7 with about one half."""
    given = DraftInput(
        mx.zeros((1, 4)), mx.array([6]), mx.array([5]), begin_text([[5, 6, 7, 8, 5, 6]])
    )
    mixed = Both(Echo([40, 41], sure), LOOKUP)  # type: ignore[arg-type]
    assert mixed.propose(given, BeamShape(1, 3)).tokens[0, 0, 1].item() == first


@pytest.mark.parametrize("width", [1, 3])
def test_the_drafters_candidates_end_early_and_the_lookups_do_not(width: int) -> None:
    text = [5, 6, 7, 8, 9, 10, 11, 5, 6]
    given = DraftInput(mx.zeros((1, 4)), mx.array([6]), mx.array([8]), begin_text([text]))
    for sure in (-0.01, -9.0):
        mixed = Both(Echo([40, 41, 42], sure), LOOKUP)  # type: ignore[arg-type]
        beams = mixed.propose(given, BeamShape(width, 6))
        for tokens, scores in zip(
            beams.tokens[0].tolist(), beams.log_probs[0].tolist(), strict=True
        ):
            drafted = tokens[1] >= 40
            assert sum(score > -np.inf for score in scores) == (4 if drafted else 6)
    assert [row[1] >= 40 for row in beams.tokens[0].tolist()].count(False) == 1


def test_a_session_looks_up_what_earlier_turns_said() -> None:
    """The text is the whole conversation, though only the new turn's tokens are read again."""
    redrafter = Redrafter(byte_model(seed=2), byte_tokenizer(), LOOKUP)
    plain = Redrafter(byte_model(seed=2), byte_tokenizer())
    drafted, undrafted = redrafter.session(), plain.session()
    seen: list[DecodeState] = []
    honest = decode._submit

    def watching(state: DecodeState, output: StepOutput) -> None:
        if state.text is not None:
            seen.append(state)
        honest(state, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_submit", watching)
        for turn in ("hello there", "hello again", "hello there"):
            got = [r.token for r in drafted.stream(turn, max_tokens=40)]
            want = [r.token for r in undrafted.stream(turn, max_tokens=40)]
            assert got == want
            last = seen[-1]
            assert last.text is not None
            history = plain.encode([*undrafted.messages[:-1]])
            assert last.text[0, : len(history)].tolist() == history
            said = last.text[0, len(history) : last.length[0].item() + 1].tolist()
            assert said[:40] == got  # the last step may say more than was asked for


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"shortest": 0}, "shortest is 0"),
        ({"shortest": 6}, "shortest is 6"),
        ({"kept": (0.5, 0.4)}, "kept is"),
        ({"kept": (0.0, 0.4)}, "kept is"),
        ({"second": 1.5}, "second is"),
    ],
)
def test_rates_that_make_no_sense_are_refused(bad: dict, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        Lookup(**bad)
