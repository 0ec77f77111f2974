"""Answers with automatic shapes: what they wait for, learn, and leave as it is."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import mlx.nn as nn
import pytest
from simulated import step_result
from tiny import byte_model, byte_tokenizer
from tune_runs import CHEAP, DEAR, PROMPT, Bench, drafted, measured, oracle, time_calls_by
from waiting import wait_for

from redrafter_mlx.cli import main, options
from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BusyError
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning import profile, tuner
from redrafter_mlx.tuning.cost import CostModel, Setup
from redrafter_mlx.tuning.policy import TunedPolicy
from redrafter_mlx.tuning.profile import Call, Profiler
from redrafter_mlx.tuning.store import save_record, saved_record
from redrafter_mlx.tuning.tuner import Tuner


def tuner_of(model: nn.Module) -> Tuner:
    tuner = drafted(model).tuning
    assert tuner is not None
    return tuner


def test_no_answer_waits_for_a_measurement(bench: Bench, model: nn.Module) -> None:
    """Only `measure` measures everything at once, and its results are stored."""
    redrafter = drafted(model)
    redrafter.warm_up()
    for asked in ({}, {"beam_width": 2}, {"max_nodes": 3}, {"draft": False}):
        redrafter.generate(PROMPT, max_tokens=4, **asked)  # type: ignore[arg-type]
    assert bench.asked == 0
    assert redrafter.tuning is not None
    assert not redrafter.tuning.measured
    redrafter.tuning.measure()
    later = drafted(byte_model(seed=2))  # same costs: other weights, same shapes
    assert later.tuning is not None
    assert later.tuning.measured
    later.tuning.file.write_text("{")
    assert not drafted(model).tuning.measured, "a damaged file counts as none"  # type: ignore[union-attr]


def calls_before_the_first_token(model: nn.Module, draft: bool) -> int:
    """Count the target's calls from loading to the first token of the first answer."""
    calls = 0
    honest = Target.verify, Target.hidden

    def verify(self, *given, **named):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        return honest[0](self, *given, **named)

    def hidden(self, *given):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        return honest[1](self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "verify", verify)
        patch.setattr(Target, "hidden", hidden)
        redrafter = drafted(model) if draft else Redrafter(model, byte_tokenizer())
        redrafter.warm_up()
        next(redrafter.stream(PROMPT, max_tokens=20))
    return calls


def test_the_first_token_takes_as_many_target_calls_as_without_drafts(
    bench: Bench, model: nn.Module
) -> None:
    """With an empty cache; graphs that were built but not computed count as calls."""
    assert bench.asked == 0
    plain = calls_before_the_first_token(model, draft=False)
    assert calls_before_the_first_token(model, draft=True) <= 1.2 * plain


def test_steps_are_timed_while_no_answer_runs(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a first answer that begins later need not save for a probe."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    monkeypatch.setattr("redrafter_mlx.tuning.tuner.saved_record", saved_record)
    redrafter = drafted(model)
    tuning = redrafter.tuning
    assert tuning is not None
    assert not tuning.knows_steps
    text = redrafter.generate(PROMPT, max_tokens=4).token_ids
    wait_for(lambda: tuning.knows_steps)
    assert redrafter.generate(PROMPT, max_tokens=4).token_ids == text


def test_a_process_of_one_answer_leaves_step_times_to_the_next_one(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its text is out, and once: later ones time nothing."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    monkeypatch.setattr("redrafter_mlx.tuning.tuner.saved_record", saved_record)
    monkeypatch.setattr("redrafter_mlx.tuning.tuner.save_record", save_record)
    timed: list[int] = []
    honest = tuner.step_times
    monkeypatch.setattr(tuner, "step_times", lambda *a: timed.append(1) or honest(*a))
    for _ in range(2):
        monkeypatch.setattr(options, "load_model", lambda *_, **__: drafted(model))
        assert main.run(["generate", "--raw", "-p", "Hel", "--max-tokens", "4"]) == 0
        later = tuner_of(model)
        assert later.knows_steps
        assert later.costs.assumed
    assert len(timed) == 2, "plain steps, and drafted ones"


def test_an_answer_that_is_out_does_not_fail_for_what_is_timed_after_it(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    monkeypatch.setattr("redrafter_mlx.tuning.tuner.saved_record", saved_record)

    def fail(*_: object) -> NoReturn:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(tuner, "step_times", fail)
    monkeypatch.setattr(options, "load_model", lambda *_, **__: drafted(model))
    assert main.run(["generate", "--raw", "-p", "Hel", "--max-tokens", "4"]) == 0
    assert "out of luck" in caplog.text


def test_batches_of_one_method_that_run_at_once_learn_together(
    bench: Bench, model: nn.Module
) -> None:
    del bench
    tuner = tuner_of(model)
    first, second, other = (tuner.policy(method) for method in ("greedy", "greedy", "sample"))
    assert first.acceptance is second.acceptance is not other.acceptance
    first.acceptance.learn(step_result(BeamShape(1, 2), [0, 0], [0, 1], [0, 1]))
    for policy in (first, second, other):
        tuner.record(policy)
    known = tuner.policy("greedy").acceptance.chances()
    assert known[0, 0] > tuner.statistics().chances()[0, 0]


def test_a_drafter_that_says_its_levels_are_dear_begins_with_short_drafts(
    bench: Bench, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redrafter_mlx.tuning.tuner.backend", lambda: "cuda")
    shapes = []
    for cost in (0.01, 0.8):
        monkeypatch.setattr(Oracle, "level_cost", cost)
        shapes.append(Tuner(model, Target(model), Oracle([1, 2], 258)).best_shape(by_clock=False))
    assert shapes[0].length > shapes[1].length
    assert bench.asked == 0


def test_two_drafters_of_one_class_share_no_times_on_disk(bench: Bench, model: nn.Module) -> None:
    """The cost of a user-defined drafter is unknown; each one is measured separately."""
    for _ in range(2):
        redrafter = oracle(model)
        assert redrafter.tuning is not None
        assert not redrafter.tuning.measured
        redrafter.tuning.measure()
        redrafter.generate(PROMPT, max_tokens=8)
    assert bench.asked == 2


def test_a_model_that_nothing_drafts_for_is_never_measured(bench: Bench, model: nn.Module) -> None:
    redrafter = Redrafter(model, byte_tokenizer())
    assert redrafter.tuning is None
    answer = redrafter.generate(PROMPT, max_tokens=8)
    assert set(answer.shapes) == {PLAIN}
    assert bench.asked == 0


def test_flags_win_over_the_automatic_shape(bench: Bench, model: nn.Module) -> None:
    bench.costs = DEAR
    redrafter = measured(oracle(model))
    fixed = redrafter.generate(PROMPT, max_tokens=60, beam_width=3, beam_length=3)
    assert set(fixed.shapes) == {BeamShape(3, 3)}
    (partly,) = set(redrafter.generate(PROMPT, max_tokens=60, beam_length=3).shapes)
    assert partly.length == 3, "the rest is what promises most"
    last = list(redrafter.stream(PROMPT, max_tokens=60, beam_length=3))[-1]
    assert last.usual_shape is None


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_automatic_shapes_change_nothing_about_what_is_said(
    bench: Bench, model: nn.Module, temperature: float
) -> None:
    wanted = {"max_tokens": 120, "temperature": temperature, "seed": 3}
    plain = oracle(model).generate(PROMPT, draft=False, **wanted)
    for known in (CHEAP, DEAR):
        bench.costs = known
        for redrafter in (measured(oracle(model)), measured(drafted(model))):
            assert redrafter.generate(PROMPT, **wanted).token_ids == plain.token_ids


def test_drafts_that_pay_are_made_and_those_that_do_not_are_not(
    bench: Bench, model: nn.Module
) -> None:
    good = list(measured(oracle(model)).stream(PROMPT, max_tokens=120))[-1]
    assert good.usual_shape not in (None, PLAIN)
    assert good.tokens_per_step > 1.3
    bench.costs = DEAR
    bad = measured(drafted(model)).generate(PROMPT, max_tokens=120)
    assert bad.shapes.count(PLAIN) > 110
    assert len(bad.shapes) == bad.steps


def test_what_one_answer_learns_the_next_one_knows(bench: Bench, model: nn.Module) -> None:
    """The first answer reveals a random drafter, so the next one hardly tries it."""
    redrafter = measured(drafted(model))
    assert bench.asked == 1
    first = redrafter.generate(PROMPT, max_tokens=40)
    second = redrafter.generate(PROMPT, max_tokens=40)
    tried = [sum(s != PLAIN for s in answer.shapes[:12]) for answer in (first, second)]
    assert tried[0] > tried[1]
    assert tried[1] <= 2


def test_asking_for_the_best_shape_begins_no_text(bench: Bench, model: nn.Module) -> None:
    tuner = measured(drafted(model)).tuning
    assert tuner is not None
    policy = tuner.policy("greedy")
    trust = policy.acceptance.trust
    for _ in range(5):
        trust.learn("long match", 1.0, 0.0)
    tuner.record(policy)
    before = trust.to_record()
    tuner.best_shape(2)
    assert trust.to_record() == before
    tuner.policy("greedy")
    assert trust.to_record() != before
    assert bench.asked == 1


@pytest.mark.usefixtures("bench")
def test_a_width_alone_is_completed_by_what_its_own_method_accepted(model: nn.Module) -> None:
    tuner = measured(drafted(model)).tuning
    assert tuner is not None
    policy = tuner.policy("greedy")
    shape = BeamShape(1, 2)
    for _ in range(60):
        policy.acceptance.learn(step_result(shape, [0, 0], [0, 1], [0]))
    before = tuner.best_shape(1, method="typical")
    tuner.record(policy)
    assert tuner.best_shape(1, method="typical") == before


@pytest.mark.usefixtures("bench")
def test_measuring_forgets_nothing_that_was_learned(model: nn.Module) -> None:
    tuner = measured(drafted(model)).tuning
    assert tuner is not None
    policy = tuner.policy("greedy")
    shape = next(iter(policy.acceptance.shapes))
    full = step_result(shape, [0] * shape.nodes, [*range(shape.nodes)], [0])
    for _ in range(30):
        policy.acceptance.learn(full)
    tuner.record(policy)
    tuner.measure()
    known = tuner.policy("greedy").acceptance.chances()
    assert known[0, 0] < 0.2 < tuner.statistics().chances()[0, 0]


def test_a_measurement_is_corrected_by_a_few_steps_before_any_answer(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafted ones take twice as long as their calls, beside plain ones."""

    def times(decoder: Decoder, count: int) -> list[float]:
        return [CHEAP.step(decoder.shape, 1) * (1 + (decoder.shape != PLAIN))] * count

    monkeypatch.setattr(Profiler, "measure", lambda _, setup, *__: replace(CHEAP, setup=setup))
    monkeypatch.setattr("redrafter_mlx.tuning.tuner.step_times", times)
    tuner = tuner_of(model)
    tuner.measure()
    known = tuner.statistics()
    calls_alone = TunedPolicy(CHEAP, known).expected_rates(128)
    for shape, (_, rate) in tuner.expected_rates(known, 128).items():
        assert rate == pytest.approx(calls_alone[shape][1] / (1 + (shape != PLAIN)))


@pytest.mark.usefixtures("bench")
def test_an_answer_begins_while_costs_are_measured(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = measured(drafted(model)).tuning
    assert tuner is not None
    begun: list[TunedPolicy] = []

    def measure(_: Profiler, setup: Setup, *__: object) -> CostModel:
        thread = threading.Thread(target=lambda: begun.append(tuner.policy("greedy")))
        thread.start()
        thread.join(30)
        return replace(CHEAP, setup=setup)

    monkeypatch.setattr(Profiler, "measure", measure)
    tuner.measure()
    assert begun


def test_sampling_a_library_uses_and_keeps_nothing(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its calls alone are timed, each after one like it. The clock stands still meanwhile."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    tuner, calls = tuner_of(model), list[Call]()

    def recording(_: Target, call: Call, times: int) -> float:
        calls.append(call)
        return 1.0 / times

    time_calls_by(monkeypatch, recording)
    before = tuner.costs
    sampled = tuner.sampled_costs()
    assert sampled.verify(6, 128) == 1.0
    assert len(calls) == 6 * (1 + 2 * 9), "one that compiles, and nine rounds"
    assert tuner.costs is before
    assert not [*tmp_path.iterdir()]


def test_a_sample_of_a_busy_machine_is_none(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other call takes twice as long: a library of products would be chosen by chance."""
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    turns = itertools.cycle([1.0, 1.0, 2.0, 2.0])
    time_calls_by(monkeypatch, lambda *_: next(turns))
    with pytest.raises(BusyError, match="too busy"):
        tuner_of(model).sampled_costs()
