"""Successors: the table's rows are the target's own, and the output stays exact."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from decoding import SHAPES, run
from tiny import VOCAB, byte_model, byte_tokenizer, plain_tokens, random_model

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.interface import Seen
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.drafting.untrained.successors import (
    OwnSuccessors,
    Successors,
    SuccessorTable,
    beginning_of_answers,
    table_of,
)
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.response import Response
from redrafter_mlx.speculation.sampling import Draws
from redrafter_mlx.structured.grammar import Grammars
from redrafter_mlx.target_model.model import Target

BEGINNING = [3, 1, 4]
WAITS = 20.0
"""Maximum seconds for what happens within one or two."""


def grown(target: Target, path: Path | None = None) -> SuccessorTable:
    table = SuccessorTable(target, BEGINNING, path)
    while table.grow() < 1:
        pass
    return table


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAITS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("beginning", [BEGINNING, [7]])
def test_a_row_is_what_plain_calls_of_the_model_find_likeliest(beginning: list[int]) -> None:
    model = random_model()
    table = SuccessorTable(Target(model), beginning)
    shares = [table.grow() for _ in range(2)]
    assert shares == [63 / VOCAB, 1.0]
    for token in range(VOCAB):
        logits = model(mx.array([[*beginning, token]]))[0, -1]
        want = np.array(logits - mx.logsumexp(logits))
        likeliest = np.argsort(-want)[:4]
        assert table.tokens[token].tolist() == likeliest.tolist()
        np.testing.assert_allclose(table.log_probs[token], want[likeliest], atol=1e-4)


@pytest.mark.parametrize(("W", "L"), [(1, 2), (1, 5), (3, 4), (4, 3)])
def test_drafts_are_the_likeliest_prefixes_by_a_slow_search_of_the_table(W: int, L: int) -> None:
    """Rows from 70 on are not known; scores never rise from a prefix to a longer one."""
    target = Target(random_model())
    table = SuccessorTable(target, BEGINNING)
    table.grow()
    drafter, known = Successors(table), table.known
    for root in (5, 9, known - 1, known, VOCAB - 1):
        seen = Seen(mx.array([[1, root]]), None, mx.array([4]), mx.array([1]), 5)
        beams, _ = drafter.draft((), seen, BeamShape(W, L))
        level = [((root,), 0.0)]
        for depth in range(1, L):
            each = [
                ((*path, int(table.tokens[path[-1], k])), score + rate(table, path[-1], k))
                for path, score in level
                if path[-1] < known
                for k in range(4)
            ]
            level = sorted(each, key=lambda one: -one[1])[:W]
            scores = beams.log_probs[0, :, depth].tolist()
            assert [s for s in scores if s > -math.inf] == pytest.approx([s for _, s in level])
            assert beams.tokens[0, : len(level), depth].tolist() == [p[-1] for p, _ in level]
        assert mx.all(beams.log_probs[:, :, 1:] <= beams.log_probs[:, :1, :1]).item()


def rate(table: SuccessorTable, token: int, k: int) -> float:
    return min(math.log(0.8) + float(table.log_probs[token, k]), math.log(0.45))


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_equal_autoregression(shape: BeamShape) -> None:
    model = random_model()
    target = Target(model)
    drafter, want = Successors(grown(target)), plain_tokens(model, [3, 5, 7], 60)
    for host in ((), (Lookup(),)):
        decoder = Decoder(target, drafter, shape, SamplingParams(), host_drafters=host)
        emitted, results = run(decoder, [3, 5, 7], 60)
        assert emitted == want
        assert all(result.nodes <= shape.nodes for result in results)


@pytest.mark.parametrize("accept", ["sample", "rejection"])
def test_a_seed_gives_the_same_text_as_without(accept: str) -> None:
    target = Target(random_model(vocab_size=12))
    sampling = SamplingParams(0.9, top_p=0.95, accept=accept)
    want, _ = run(Decoder(target, None, PLAIN, sampling), [3, 5, 7], 80, seed=4)
    drafter = Successors(grown(target))
    for shape in (BeamShape(1, 4), BeamShape(3, 4), BeamShape(4, 4, 6)):
        decoder = Decoder(target, drafter, shape, sampling)
        emitted, results = run(decoder, [3, 5, 7], 80, seed=4)
        assert emitted == want
        assert len(results) < len(emitted)


def test_what_is_known_is_kept_and_grows_on(tmp_path: Path) -> None:
    target, path = Target(byte_model()), tmp_path / "successors" / "a.npz"
    whole = grown(target, path)
    again = SuccessorTable(target, BEGINNING, path)
    assert again.known == whole.known == len(whole.tokens)
    np.testing.assert_array_equal(again.tokens, whole.tokens)
    np.savez(path, tokens=whole.tokens[:70], log_probs=whole.log_probs[:70], beginning=BEGINNING)
    part = SuccessorTable(target, BEGINNING, path)
    assert part.known == 70
    while part.grow() < 1:
        pass
    np.testing.assert_array_equal(part.tokens, whole.tokens)


def test_the_table_of_another_process_that_knows_as_much_stays(tmp_path: Path) -> None:
    target, path = Target(byte_model()), tmp_path / "a.npz"
    slower = SuccessorTable(target, BEGINNING, path)
    grown(target, path)
    os.utime(path, (0, 0))
    while slower.grow() < 1:
        pass
    assert path.stat().st_mtime == 0
    assert SuccessorTable(target, BEGINNING, path).complete


def test_a_damaged_file_or_one_of_another_model_counts_as_none(tmp_path: Path) -> None:
    target, path = Target(byte_model()), tmp_path / "a.npz"
    whole = grown(target, path)
    good, n = path.read_bytes(), len(whole.tokens)
    tokens, log_probs = whole.tokens, whole.log_probs
    files = [good[: len(good) // 2], b"", b"not an archive"]
    for path_, (t, p, b) in {
        "vocabulary": (tokens + target.vocab_size, log_probs, BEGINNING),
        "negative": (tokens - target.vocab_size, log_probs, BEGINNING),
        "sizes": (tokens[:, :3], log_probs, BEGINNING),
        "probabilities": (tokens, log_probs + 100, BEGINNING),
        "not a number": (tokens, log_probs * np.float32(np.nan), BEGINNING),
        "types": (tokens.astype(np.float32), log_probs, BEGINNING),
        "rows": (np.tile(tokens, (2, 1)), np.tile(log_probs, (2, 1)), BEGINNING),
        "beginning": (tokens, log_probs, [3, 1]),
    }.items():
        np.savez(tmp_path / f"{path_}.npz", tokens=t, log_probs=p, beginning=b)
        files.append((tmp_path / f"{path_}.npz").read_bytes())
    for content in files:
        path.write_bytes(content)
        table = SuccessorTable(target, BEGINNING, path)
        assert table.known == 0
    assert grown(target, path).known == n
    assert SuccessorTable(target, BEGINNING, path).known == n


def test_a_table_belongs_to_the_weights_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    one, other = (Target(byte_model(seed)) for seed in (1, 2))
    OwnSuccessors().bind(one, byte_tokenizer())
    assert table_of(one, byte_tokenizer()).complete
    assert table_of(other, byte_tokenizer()).known == 0


def test_the_noise_of_the_targets_draws_decides_between_successors() -> None:
    """A draft is what would be drawn if the table were the target's distribution."""
    table = grown(Target(random_model()))
    table.known -= 1
    drafter, noise = Successors(table), mx.random.gumbel((1, 4, VOCAB), key=mx.random.key(3))
    draws = Draws(noise, mx.array([0.7]))
    for root in (*range(20), VOCAB - 1):
        seen = Seen(mx.array([[1, root]]), None, mx.array([4]), mx.array([1]), 5, draws=draws)
        beams, _ = drafter.draft((), seen, BeamShape(1, 2))
        if root >= table.known:
            assert beams.log_probs[0, 0].tolist() == [0.0, -math.inf]
            continue
        rates = [rate(table, root, k) / 0.7 for k in range(4)]
        after = table.tokens[root].tolist()
        drawn = [r + noise[0, 0, token].item() for r, token in zip(rates, after, strict=True)]
        assert beams.tokens[0, 0, 1].item() == after[int(np.argmax(drawn))]


def test_what_tokens_are_read_after_ends_as_prompts_do_and_holds_no_words_of_a_user() -> None:
    tokenizer = byte_tokenizer()
    found = beginning_of_answers(tokenizer)
    prompt = Redrafter(byte_model(), tokenizer).encode("why is the sky blue?")
    after = found[1:-3]
    assert found[-3:] == tokenizer.encode("...", add_special_tokens=False)
    assert found[0] == prompt[0]
    assert 0 < len(after) < len(prompt)
    assert list(prompt[-len(after) :]) == after


def prepared(**changes: object) -> tuple[Redrafter, SuccessorTable]:
    model = byte_model(seed=2)
    target = Target(model)
    table = SuccessorTable(target, BEGINNING)
    return Redrafter(model, byte_tokenizer(), target=target, prepare=table.grow, **changes), table  # type: ignore[arg-type]


def test_the_table_grows_while_no_answer_runs_and_answers_go_on() -> None:
    redrafter, table = prepared()
    before = redrafter.generate([1, 2, 3], max_tokens=30).token_ids
    assert table.known == 0
    until(lambda: table.known > 0)
    assert redrafter.generate([1, 2, 3], max_tokens=30).token_ids == before
    until(lambda: table.complete)


def test_a_batch_of_answers_is_what_each_is_alone() -> None:
    plain = Redrafter(byte_model(seed=2), byte_tokenizer())
    drafter = Successors(grown(plain.target))
    redrafter = Redrafter(byte_model(seed=2), byte_tokenizer(), drafter)
    prompts = [[1, 2, 3], [9] * 5, [4, 4, 7, 1]]
    together: list[list[int]] = [[] for _ in prompts]
    for i, response in redrafter.batch(prompts, max_tokens=30, beam_width=2, beam_length=4):
        together[i].append(response.token)
    want = [plain.generate(prompt, max_tokens=30).token_ids for prompt in prompts]
    assert together == want


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_cuts_successors_and_the_answer_is_the_same(temperature: float) -> None:
    plain = Redrafter(byte_model(seed=2), byte_tokenizer())
    drafted = Redrafter(byte_model(seed=2), byte_tokenizer(), Successors(grown(plain.target)))
    grammars = Grammars(byte_tokenizer(), plain.target.vocab_size)

    def answer(redrafter: Redrafter, **shape: int) -> list[Response]:
        constraint = grammars.compile("start: /[!-z]{40}/")
        given = {"max_tokens": 60, "temperature": temperature, "seed": 3, **shape}
        return list(redrafter.stream([1, 2, 3], constraint=constraint, **given))

    want = answer(plain)
    assert len(want) > 39
    for shape in ({}, {"beam_width": 1, "beam_length": 4}, {"beam_width": 4, "beam_length": 3}):
        got = answer(drafted, **shape)
        assert [each.token for each in got] == [each.token for each in want]
    assert any(each.source == "drafter" for each in got), "some successors are in the grammar"


def test_turns_of_a_conversation_are_the_same_with_successors() -> None:
    """Each goes on from the cache of the turn before, into which drafts were written."""
    plain = Redrafter(byte_model(seed=2), byte_tokenizer())
    drafted = Redrafter(byte_model(seed=2), byte_tokenizer(), Successors(grown(plain.target)))
    sessions = [redrafter.session() for redrafter in (plain, drafted)]
    for turn, shape in (("Hi", (1, 4)), ("and then?", (4, 3)), ("why", (2, 2))):
        given = {"beam_width": shape[0], "beam_length": shape[1], "max_tokens": 25}
        want, got = ([*session.stream(turn, **given)] for session in sessions)
        assert [each.token for each in got] == [each.token for each in want]
        assert got[0].cached_tokens == want[0].cached_tokens
    assert got[0].cached_tokens > 25, "earlier turns are not read again"


def test_answers_go_on_where_the_table_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: SuccessorTable) -> float:
        raise ValueError("no such kernel")

    monkeypatch.setattr(SuccessorTable, "grow", fails)
    redrafter, table = prepared()
    with caplog.at_level(logging.WARNING, "redrafter_mlx.engine"):
        want = redrafter.generate([1, 2, 3], max_tokens=8).token_ids
        until(lambda: "no such kernel" in caplog.text)
    assert redrafter.generate([1, 2, 3], max_tokens=8).token_ids == want
    assert table.known == 0


def test_words_that_the_target_lacks_are_not_read() -> None:
    """Some tokenizers have more tokens than their model, which would read what is not there."""
    target = Target(random_model())
    known, more = (SuccessorTable(target, beginning) for beginning in ([1, 2], [1, 10**6, 2]))
    for table in (known, more):
        while not table.complete:
            table.grow()
    assert np.array_equal(known.tokens, more.tokens)
    assert np.array_equal(known.log_probs, more.log_probs)
