"""Answers with automatic shapes: what they wait for, learn, and leave as it is."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlx.nn as nn
import pytest
from simulated import step_result
from tiny import byte_model, byte_tokenizer, random_drafter
from tune_runs import CHEAP, DEAR, PROMPT, Bench, drafted, measured, oracle, time_calls_by

from redrafter_mlx.cli import main, options
from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.decoding.sequence import Proposal
from redrafter_mlx.decoding.sequence import Sequence as Row
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.engine import engine
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BusyError
from redrafter_mlx.learning.keeper import TextKeeper
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning import profile
from redrafter_mlx.tuning.cost import CostModel, Setup
from redrafter_mlx.tuning.policy import TunedPolicy
from redrafter_mlx.tuning.profile import Call, Profiler
from redrafter_mlx.tuning.store import save_record, saved_record
from redrafter_mlx.tuning.tuner import Tuner, trial_shapes

TRIAL = [*trial_shapes(4)]


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


def kept(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Keep what is learned in a folder, with the times that steps really take."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(folder))
    monkeypatch.setattr("redrafter_mlx.tuning.tuner.saved_record", saved_record)
    monkeypatch.setattr("redrafter_mlx.tuning.tuner.save_record", save_record)


def proposals(monkeypatch: pytest.MonkeyPatch) -> list[BeamShape]:
    """Return a list that grows by the shape of each step that is not the options' own."""
    proposed: list[BeamShape] = []
    honest = TunedPolicy.propose

    def propose(policy: TunedPolicy, sequences: Sequence[Row]) -> Proposal:
        proposal = honest(policy, sequences)
        proposed.append(proposal.shape)
        return proposal

    monkeypatch.setattr(TunedPolicy, "propose", propose)
    return proposed


def test_warming_up_tries_the_drafter_once_for_a_model_and_a_machine(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain steps, the smallest tree and a larger one, of which nothing but statistics is kept."""
    kept(monkeypatch, tmp_path)
    proposed, first = proposals(monkeypatch), drafted(model)
    first.warm_up()
    assert proposed[: len(TRIAL)] == TRIAL
    assert len(proposed) <= len(TRIAL) + 3, "and what was submitted when the last one was read"
    first.close()
    proposed.clear()
    drafted(model).warm_up()
    assert not proposed, "a later process knows"
    other = Redrafter(model, byte_tokenizer(), random_drafter(vocab_size=258, seed=5))
    other.warm_up()
    assert proposed[: len(TRIAL)] == TRIAL, "another drafter is accepted at other rates"


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
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a trial, by an earlier process; graphs that were not computed count as calls."""
    kept(monkeypatch, tmp_path)
    drafted(model).warm_up()
    plain = calls_before_the_first_token(model, draft=False)
    assert calls_before_the_first_token(model, draft=True) <= 1.2 * plain


def test_generate_tries_the_drafter_before_its_first_answer(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(monkeypatch, tmp_path)
    proposed = proposals(monkeypatch)
    for number in range(2):
        monkeypatch.setattr(options, "load_model", lambda *_, **__: drafted(model))
        assert main.run(["generate", "--raw", "-p", "Hel", "--max-tokens", "4"]) == 0
        assert (proposed[: len(TRIAL)] == TRIAL) == (number == 0)
        proposed.clear()


def test_a_trial_leaves_answers_and_their_prefixes_as_they_are(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(monkeypatch, tmp_path)
    plain = drafted(model).generate(PROMPT, max_tokens=30, draft=False)
    redrafter = drafted(model)
    assert redrafter.try_drafter()
    assert not redrafter.try_drafter()
    (first, *_) = redrafter.stream(PROMPT, max_tokens=30)
    assert first.cached_tokens == 0
    assert redrafter.generate(PROMPT, max_tokens=30).token_ids == plain.token_ids


def test_a_trial_on_a_slow_machine_ends_in_time(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not tried by then is found out while answering."""
    kept(monkeypatch, tmp_path)
    proposed, redrafter = proposals(monkeypatch), drafted(model)
    clock = itertools.count(0.0, 4.0)
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert redrafter.try_drafter()
    assert len(proposed) < 8
    assert set(redrafter.generate(PROMPT, max_tokens=8).shapes) == {PLAIN}


def test_a_trial_is_no_answer_that_a_drafter_learns_from(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(monkeypatch, tmp_path)
    keeper, drafter = TextKeeper("tiny", "f", lambda _: ""), random_drafter(vocab_size=258)
    redrafter = Redrafter(model, byte_tokenizer(), drafter, keeper=keeper)
    assert redrafter.try_drafter()
    assert keeper.kept == 0


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


def test_after_a_measurement_the_drafter_is_tried_again(
    bench: Bench, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Corrections of the costs before it mean nothing."""
    monkeypatch.setattr("redrafter_mlx.tuning.tuner.trial_shapes", trial_shapes)
    proposed, redrafter = proposals(monkeypatch), drafted(model)
    redrafter.warm_up()
    proposed.clear()
    redrafter.measure()
    assert bench.asked == 1
    assert proposed[: len(TRIAL)] == TRIAL


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
