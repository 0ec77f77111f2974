"""A plain step that nothing can change is submitted before the one before it is read."""

from __future__ import annotations

import random
from collections import abc
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import pytest
from batches import FEW, GREEDY, VARIOUS, Decoded, drafted, finish, scheduled, some, tiny

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding import built_step
from redrafter_mlx.decoding import pipeline as pipeline_module
from redrafter_mlx.decoding.acceptance import Report
from redrafter_mlx.decoding.pipeline import Pipeline
from redrafter_mlx.decoding.sequence import FixedPolicy, Proposal, Sequence
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.untrained.ngram import Lookup, NgramIndex
from redrafter_mlx.response import StepResult
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target_model.cache.slots import CAPACITY_STEP


class Waiting(FixedPolicy):
    """Plain steps that wait in these turns, as if for copies, which never come."""

    def __init__(self, *turns: bool) -> None:
        super().__init__(PLAIN)
        self._turns = cycle(turns)
        self.answers: set[bool] = set()

    def may_revise(self, rows: abc.Sequence[Sequence]) -> bool:
        del rows
        turn = next(self._turns)
        self.answers.add(turn)
        return turn


def steps(sequence: Decoded) -> list[tuple[object, ...]]:
    return [(r.tokens, r.sources, r.path, r.shape, r.from_host) for r in sequence.results]


def both(decoder: Decoder) -> tuple[Decoder, Decoder]:
    """Return the decoder with a target that submits ahead, and with one that waits."""
    waiting, ahead = tiny(layers=1), tiny(layers=1)
    waiting.submits_ahead, ahead.submits_ahead = False, True
    return replace(decoder, target=ahead), replace(decoder, target=waiting)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the loop does, in order: it submits a step, or reads one."""
    found: list[str] = []
    submit = pipeline_module.submit_verification

    def submitted(*given: object) -> None:
        found.append("submit")
        submit(*given)  # type: ignore[arg-type]

    honest = Report.read

    def read(report: Report) -> list[StepResult]:
        found.append("read")
        return honest(report)

    monkeypatch.setattr(pipeline_module, "submit_verification", submitted)
    monkeypatch.setattr(Report, "read", read)
    return found


@pytest.mark.parametrize("shape", [PLAIN, BeamShape(3, 4)])
@pytest.mark.parametrize("host", [(), (Lookup(1),), (Lookup(3),)])
@pytest.mark.parametrize("params", VARIOUS)
def test_each_step_is_that_of_the_loop_that_waits(
    shape: BeamShape, host: tuple[Lookup, ...], params: SamplingParams
) -> None:
    rng = random.Random(3)
    decoders = both(Decoder(tiny(), None, shape, params, host_drafters=host))
    for prompt in ([rng.randrange(FEW) for _ in range(length)] for length in (1, 9)):
        ahead, waiting = (Decoded(prompt, 40, params=params).alone(d) for d in decoders)
        assert steps(ahead) == steps(waiting)


def test_rows_that_join_and_leave_are_decoded_as_if_alone() -> None:
    rng = random.Random(7)
    ahead, waiting = both(
        Decoder(tiny(), None, BeamShape(2, 3), GREEDY, host_drafters=(Lookup(3),))
    )
    for _ in range(20):
        sequences = some(rng, 3, [GREEDY])
        assert len(scheduled(ahead, sequences, rng)) == 3
        for each in sequences:
            assert steps(each) == steps(each.alone(waiting))


def test_a_plain_step_is_submitted_before_the_one_before_is_read(events: list[str]) -> None:
    ahead, waiting = both(Decoder(tiny(), None, PLAIN, GREEDY))
    Decoded([1, 2], 5).alone(ahead)
    assert events == ["submit"] + ["submit", "read"] * 5, "the last one is of no use"
    events.clear()
    Decoded([1, 2], 5).alone(waiting)
    assert events == ["submit", "read"] * 5


def test_a_batch_submits_ahead_and_goes_on_without_the_row_that_ended(events: list[str]) -> None:
    """A row leaves at once when it ends, which nobody foresees, and the others do not wait."""
    ahead, waiting = both(Decoder(tiny(), None, PLAIN, GREEDY))
    sequences = [Decoded([1, 2], 6), Decoded([3, 4, 5], 3), Decoded([6], 6)]
    batch = Pipeline(ahead, FixedPolicy(PLAIN))
    rows = [each.join(batch, ahead) for each in sequences]
    batch.advance()
    events.clear()
    left = {rows.index(row): 6 - n for n in range(5) for row, _ in batch.advance().ended}
    assert events == [
        *["submit", "read"] * 2,  # the second token of each row, and the last one of the shortest
        *["read", "submit"],  # without the row that ended
        *["submit", "read"] * 2,  # the last one is of no use
    ]
    assert not batch.sequences
    assert left == {1: 5, 0: 2, 2: 2}
    for each in sequences:
        assert steps(each) == steps(each.alone(waiting))


class EndsAtFive(Sequence):
    """A sequence that is known to end with its fifth token."""

    @property
    def ends_next(self) -> bool:
        return self.committed == 5


def test_an_answer_whose_last_token_is_known_submits_nothing_after_it(events: list[str]) -> None:
    ahead, _ = both(Decoder(tiny(), None, PLAIN, GREEDY))
    sequence, batch = Decoded([1, 2], 5), Pipeline(ahead, FixedPolicy(PLAIN))
    sequence.join(batch, ahead, kind=EndsAtFive)
    finish(batch)
    assert events == ["submit"] + ["submit", "read"] * 4 + ["read"]


def test_a_step_that_results_may_change_is_submitted_after_they_are_read(events: list[str]) -> None:
    """Trees of drafts, and texts that any token makes repeat themselves."""
    ahead, _ = both(Decoder(tiny(), None, BeamShape(2, 3), GREEDY, host_drafters=(Lookup(1),)))
    for decoder in (ahead, drafted(ahead.target, BeamShape(2, 3))):
        events.clear()
        Decoded([1, 2], 9).alone(decoder)
        assert events == ["submit", "read"] * (len(events) // 2)


class OnePlainInThree(FixedPolicy):
    chosen = 0

    def propose(self, rows: abc.Sequence[Sequence]) -> Proposal:
        self.chosen += 1
        return Proposal(PLAIN) if self.chosen % 3 == 0 else super().propose(rows)


def test_a_plain_step_between_trees_is_timed_without_the_host_that_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the host takes time by this clock. In plain decoding, it works meanwhile.

    It works before a step is submitted, and while and after drafts are.
    """
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(built_step, "time", clock)
    submit = pipeline_module.submit_drafting

    def drafting(*given: object) -> None:
        clock.now += 10
        submit(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline_module, "submit_drafting", drafting)
    ahead, _ = both(Decoder(tiny(), None, PLAIN, GREEDY))
    decoder, sequence = drafted(ahead.target, BeamShape(2, 3)), Decoded([1, 2], 30)
    batch = Pipeline(decoder, OnePlainInThree(decoder.shape))
    row = sequence.join(batch, decoder)

    def finished(result: StepResult) -> bool:
        clock.now += 1
        return sequence.finished(result)

    row.on_result = finished
    finish(batch)
    timed = [step for step in sequence.results if step.seconds is not None]
    assert {(step.query_rows == 1, step.seconds) for step in timed} == {(True, 0), (False, 11)}

    # A step that waits in plain decoding too is timed as it is.
    decoder, sequence = replace(ahead, host_drafters=(Lookup(1),)), Decoded([1, 2], 30)
    batch = Pipeline(decoder, Waiting(True))
    sequence.join(batch, decoder).on_result = finished
    finish(batch)
    assert {step.seconds for step in sequence.results if step.seconds is not None} == {11}


@pytest.mark.parametrize("blocked", [0.0, 0.8])
def test_a_step_takes_as_long_as_the_device_whenever_the_host_gets_to_read_it(
    monkeypatch: pytest.MonkeyPatch, blocked: float
) -> None:
    """The device needs a second for a step, and MLX submits one once a part of it is computed."""
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    done: list[float] = []  # when each step is computed

    def submitted(*_: object) -> None:
        begins = max(clock.now, done[-1] if done else 0.0)
        done.append(begins + 1)
        clock.now = max(clock.now, begins + blocked)

    unread = iter(done)

    honest = Report.read

    def read(report: Report) -> list[StepResult]:
        clock.now = max(clock.now, next(unread))
        return honest(report)

    monkeypatch.setattr(built_step, "time", clock)
    monkeypatch.setattr(pipeline_module, "submit_verification", submitted)
    monkeypatch.setattr(Report, "read", read)
    ahead, _ = both(Decoder(tiny(), None, PLAIN, GREEDY, host_drafters=(Lookup(2),)))
    sequence, shapes = Decoded([1, 2], 60), Waiting(True, True, False, False, False, True, False)
    batch = Pipeline(ahead, shapes)
    sequence.join(batch, ahead)
    finish(batch)
    times = [step.seconds for step in sequence.results if step.seconds is not None]
    assert shapes.answers == {True, False}, "some steps wait, and some do not"
    assert len(times) > 10
    assert times == pytest.approx([1.0] * len(times))


def test_a_long_row_that_left_takes_no_more_room() -> None:
    """Otherwise an answer that goes on might be ended for want of memory that nobody needs."""
    ahead, _ = both(Decoder(tiny(), None, PLAIN, GREEDY))
    batch = Pipeline(ahead, FixedPolicy(PLAIN))
    Decoded([1] * (CAPACITY_STEP - 4), 4).join(batch, ahead)
    Decoded([2], 20).join(batch, ahead)
    while len(batch.sequences) == 2:
        batch.advance()
    while batch.sequences:
        assert batch.growth == 0
        batch.advance()


@pytest.mark.parametrize("others", [0, 2])
def test_a_text_is_continued_from_the_cache_of_an_answer_that_ended(others: int) -> None:
    ahead, waiting = both(Decoder(tiny(), None, PLAIN, GREEDY))
    first, batch = Decoded([1, 2, 3], 6), Pipeline(ahead, FixedPolicy(PLAIN))
    first.join(batch, ahead)
    for seed in range(others):
        Decoded([seed], 20).join(batch, ahead)
    ended: list[tuple[Sequence, pipeline_module.SequenceCache]] = []
    while batch.sequences:
        ended += batch.advance().ended
    row, cache = ended[0]
    text = [*first.prompt, *first.emitted]
    assert row.committed == len(text) - 1
    longer = Decoded([*text, 5, 6], 8)
    batch = Pipeline(ahead, FixedPolicy(PLAIN))
    again = Sequence(longer.finished, len(longer.prompt))
    start = ahead.start(cache, row.committed, [longer.prompt], sequence_keys(0))
    batch.join(again, *start)
    finish(batch)
    assert longer.emitted == Decoded([*text, 5, 6], 8).alone(waiting).emitted


@pytest.mark.parametrize("shortest", [1, 2, 3, 4])
def test_no_token_makes_a_match_where_none_may_follow(shortest: int) -> None:
    rng, counts = random.Random(shortest), {True: 0, False: 0}
    for _ in range(100):
        text = [rng.randrange(4) for _ in range(rng.randrange(1, 30))]
        index = NgramIndex(Lookup(shortest), text)
        matches = []
        for token in range(4):
            longer = NgramIndex(Lookup(shortest), [*text, token])
            matches.append(max([copy.expected for copy in longer.continuations(2, 3)], default=0))
        copy = index.next_continuation(3)
        assert (copy is not None) == any(matches)
        assert copy is None or copy.expected == max(matches)
        counts[copy is not None] += 1
    assert counts[True] > 5
    assert counts[False] > 5 or shortest == 1
