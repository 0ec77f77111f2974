"""Measuring the machine, and the command that does it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from simulated import SETUP
from tiny import byte_tokenizer, random_drafter, random_model
from tune_runs import CHEAP, DEAR, Bench, drafted, measured, time_calls_by

from redrafter_mlx.cli import main, options
from redrafter_mlx.cli.generate import print_answer
from redrafter_mlx.cli.terminal import Terminal, shape_note
from redrafter_mlx.config import PLAIN, BeamShape, GenerationOptions
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning import profile
from redrafter_mlx.tuning.cost import Setup, setup_of
from redrafter_mlx.tuning.profile import (
    DRAFT_LENGTHS,
    LONG_ROWS,
    MAX_SPREAD,
    ROWS,
    Call,
    Profiler,
    drafting_call,
    random_tree,
)
from redrafter_mlx.tuning.store import Record, save_record, saved_record


def test_drafting_is_timed_with_and_without_a_memory(model: nn.Module) -> None:
    target, words = Target(model), byte_tokenizer()
    remembers = DraftModel(model, words).bind(target, words)
    for drafter in (random_drafter(vocab_size=258).bind(target), remembers):
        tokens, *_ = drafting_call(target, drafter, BeamShape(2, 3))()
        assert tokens.shape == (1, 5)


def test_curves_hold_for_tensors_of_these_shapes_and_types_alone() -> None:
    def setup(model: nn.Module, **changes: object) -> Setup:
        target = Target(model)
        return setup_of(model, target, random_drafter(**changes).bind(target).timing_key)

    mine = setup(random_model(seed=1))
    assert setup(random_model(seed=2)) == mine
    assert setup(random_model(num_hidden_layers=3)) != mine
    assert setup(random_model(seed=1), exit_dim=40) != mine
    half = random_model(seed=1)
    half.set_dtype(mx.float16)
    assert setup(half) != mine
    model = random_model(seed=1)
    assert setup_of(model, Target(model), "lookup") != mine


@pytest.mark.parametrize("rows", ROWS)
def test_a_tree_to_measure_with_has_as_many_nodes_as_asked(rows: int) -> None:
    tree = random_tree(rows, 97)
    assert tree.tokens.shape == (1, rows)
    assert bool(mx.all(tree.valid))
    assert tree.is_chain == (rows <= 2)


def profiler(widest: int) -> Profiler:
    """Return the profiler of a random model, with a drafter if `widest` > 0."""
    target = Target(random_model())
    return Profiler(target, random_drafter().bind(target) if widest else None, widest)


def test_measuring_finds_the_cliff_that_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Calls of more than six rows take longer; only calls advance the clock."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    machine = profiler(widest=2)
    honest, now = machine.target.verify, 0.0

    def slower(tree, cache, length, bound, **more):  # type: ignore[no-untyped-def]
        nonlocal now
        now += 0.03 if tree.tokens.shape[1] > 6 else 0.004
        return honest(tree, cache, length, bound, **more)

    def tick() -> float:
        nonlocal now
        now += 1e-6
        return now

    monkeypatch.setattr(machine.target, "verify", slower)
    monkeypatch.setattr(profile.time, "perf_counter", tick)
    told: list[float] = []
    costs = machine.measure(SETUP, told.append, budget=1.0)
    assert [r for r, _ in costs.short] == list(ROWS)
    assert [r for r, _ in costs.long] == list(LONG_ROWS)
    assert {(w, n) for w, n, _ in costs.draft} == {(w, n) for w in (1, 2) for n in DRAFT_LENGTHS}
    assert costs.verify(7, 128) > 2 * costs.verify(6, 128)
    assert max(costs.cliffs().items(), key=lambda cliff: cliff[1])[0] == 6
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert save_record(SETUP, Record(costs), "0", measured=True)
    assert saved_record(SETUP, "0").costs == costs


def test_a_crawling_machine_is_measured_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case once, and its first call is the measurement."""
    machine = profiler(widest=1)
    honest, calls = machine.target.verify, Counter[int]()

    def counting(tree, cache, length, bound, **more):  # type: ignore[no-untyped-def]
        calls[tree.tokens.shape[1]] += 1
        return honest(tree, cache, length, bound, **more)

    monkeypatch.setattr(machine.target, "verify", counting)
    costs = machine.measure(SETUP, budget=0.0)
    assert len(costs.short) < len(ROWS) / 1.5
    assert {calls[rows] for rows in (6, 8, 10, 13, 24)} == {1}


def on_a_clock(
    monkeypatch: pytest.MonkeyPatch, machine: Profiler, seconds: Callable[[int, int], float]
) -> Counter[int]:
    """Let a call take seconds by its rows and its number among such calls, and nothing else any.

    Return the number of calls by rows.
    """
    honest, now, calls = machine.target.verify, 0.0, Counter[int]()

    def verify(tree, cache, length, bound, **more):  # type: ignore[no-untyped-def]
        nonlocal now
        rows = tree.tokens.shape[1]
        calls[rows] += 1
        now += seconds(rows, calls[rows])
        return honest(tree, cache, length, bound, **more)

    monkeypatch.setattr(machine.target, "verify", verify)
    monkeypatch.setattr(profile.time, "perf_counter", lambda: now)
    return calls


def test_a_busy_machine_is_measured_until_its_repeats_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first calls of a case take up to seven times as long as all later ones."""
    machine = profiler(widest=0)
    on_a_clock(monkeypatch, machine, lambda _, number: 0.1 * max(1, 8 - number))
    found = machine.measure(SETUP, budget=len(machine.cases()) * 0.8)
    assert dict(found.short)[5] == pytest.approx(0.1)
    assert found.spread <= MAX_SPREAD
    quick = profiler(widest=0)
    calls = on_a_clock(monkeypatch, quick, lambda *_: 0.1)
    quick.measure(SETUP, budget=len(quick.cases()) * 0.4)
    assert calls[5] == 1 + 2 * 3


@pytest.mark.parametrize("budget", [1.0, 12.0])
def test_measuring_ends_in_time_on_a_machine_that_stays_busy(
    monkeypatch: pytest.MonkeyPatch, budget: float
) -> None:
    """Every other call takes twice as long; what was measured is not usable."""
    machine = profiler(widest=0)
    calls = on_a_clock(monkeypatch, machine, lambda _, n: 0.01 if n // 2 % 2 else 0.02)
    found = machine.measure(SETUP, budget=budget)
    assert found.spread == pytest.approx(1.0)
    assert found.spread > MAX_SPREAD
    assert calls.total() * 0.02 < 12 * budget


def test_a_call_that_seems_dearer_than_one_with_more_rows_is_timed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine is busy in the first calls of two rows; those of five take longer than of six."""
    machine = profiler(widest=0)

    def seconds(rows: int, number: int) -> float:
        return {2: 0.5 if number < 12 else 0.102, 5: 0.3}.get(rows, 0.1 + rows / 1000)

    calls = on_a_clock(monkeypatch, machine, seconds)
    shortest = dict(machine.measure(SETUP, budget=15.0).short)
    assert shortest[2] == pytest.approx(0.102)
    assert shortest[5] == pytest.approx(0.3), "it is no noise"
    assert max(calls.values()) < 40


def test_a_machine_that_is_too_busy_to_be_measured_is_said_so_and_nothing_is_kept(
    bench: Bench, shell: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bench.costs = replace(CHEAP, spread=0.45)
    assert shell("tune") == 1
    assert "too busy" in (error := capsys.readouterr().err)
    assert "45%" in error
    assert not (tmp_path / "tuning").exists()
    bench.costs = CHEAP
    assert shell("tune") == 0
    bench.costs = replace(DEAR, spread=0.45)
    assert shell("tune", "--again") == 1
    capsys.readouterr()
    assert shell("tune", "--json") == 0
    assert json.loads(capsys.readouterr().out)["cliffs"], "what was known before is still used"


def test_drafting_is_timed_for_the_lengths_that_are_drafted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A time kept for more levels than a drafter has would make its longest shapes too cheap."""
    machine = profiler(widest=1)
    drafter = machine.drafter
    assert drafter is not None
    monkeypatch.setattr(type(drafter), "max_length", 6)
    assert {n for kind, _, n in machine.cases() if kind == "draft"} == {2, 4, 6}
    monkeypatch.setattr(type(drafter), "max_length", 3)
    assert {n for kind, _, n in machine.cases() if kind == "draft"} == {2, 3}


def test_a_call_is_timed_after_one_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the decoding loop: the first call after another kind allocates other buffers."""
    machine, calls = profiler(widest=1), list[Call]()

    def recording(target: Target, call: Call, times: int) -> float:
        del target, times
        calls.append(call)
        return 1.0

    time_calls_by(monkeypatch, recording)
    machine.measure(SETUP, budget=60.0)
    repeats = calls[len(machine.cases()) :]
    assert len(repeats) >= 4 * len(machine.cases())
    assert repeats[::2] == repeats[1::2]


@pytest.mark.parametrize(("seconds", "at_once"), [(1.0, 1), (0.004, 5)])
def test_short_calls_are_submitted_together_so_that_their_wait_for_the_host_counts_less(
    monkeypatch: pytest.MonkeyPatch, seconds: float, at_once: int
) -> None:
    numbers = list[int]()

    def recording(_: Target, __: Call, times: int) -> float:
        numbers.append(times)
        return seconds

    time_calls_by(monkeypatch, recording)
    profiler(widest=0).measure(SETUP, budget=9.0)
    assert {*numbers} == {1, at_once}


def test_without_a_drafter_the_targets_calls_alone_are_measured() -> None:
    costs = profiler(widest=0).measure(SETUP, budget=0.0)
    assert costs.draft == ()
    assert costs.drafting(2, 4) == 0.0


def test_tune_prints_the_curves_the_cliff_the_shape_and_the_file(
    shell: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert shell("tune") == 0
    out = capsys.readouterr().out
    assert "   8          21.60          25.92   cliff: one row more costs 94%" in out
    assert out.count("cliff:") == 1
    assert "drafts W " in out
    assert "times the speed of plain decoding" in out
    (kept,) = (tmp_path / "tuning").glob("*.json")
    assert f"kept in {kept}" in out
    assert "busy" not in out


def test_tune_measures_again_only_when_told(
    shell: Callable[..., int], bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    for asked, more in ((1, []), (1, []), (2, ["--again"])):
        assert shell("tune", "--json", *more) == 0
        assert bench.asked == asked
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["cliffs"] == [{"rows": 8, "jump": pytest.approx(0.935, abs=0.01)}]
    assert record["shape"]["nodes"] <= 8
    assert record["speedup"] > 1
    assert len(record["short"]) == len(ROWS)


def test_tune_says_that_it_falls_back_to_plain_decoding(
    shell: Callable[..., int], bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.costs = DEAR
    assert shell("tune") == 0
    assert "falls back to plain decoding" in capsys.readouterr().out


def test_tune_draws_a_picture(shell: Callable[..., int], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert shell("tune", "--plot", str(tmp_path / "curves.png")) == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_tune_refuses_what_it_cannot_do_in_one_line(
    shell: Callable[..., int], model: nn.Module, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Without any drafter at once, before a BLAS is measured."""
    assert shell("tune", "--plot", "nowhere/x.png") == 1
    monkeypatch.setattr(options, "load_model", lambda *_, **__: Redrafter(model, byte_tokenizer()))
    assert main.run(["tune"]) == 1
    monkeypatch.setattr("redrafter_mlx.cli.doctor.blas_choice.compare_libraries", None)
    assert main.run(["tune", "--drafter", "none"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "there is no folder nowhere" in lines[0]
    for line in lines[1:]:
        assert "no drafter" in line
        assert "--drafter lookup" in line
    assert len(lines) == 3


def test_generate_names_the_shape_it_drafted_most(
    shell: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("generate", "--raw", "-p", "Hel", "--max-tokens", "20")
    assert shell(*asked) == 0
    note = capsys.readouterr().err.splitlines()[-1]
    assert "plain" in note
    assert shell("tune") == 0
    capsys.readouterr()
    assert shell(*asked) == 0
    (note,) = capsys.readouterr().err.splitlines()
    assert "mostly W " in note


def test_tune_has_no_shape_to_name_where_the_text_alone_is_copied(
    bench: Bench,
    model: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lookup = Redrafter(model, byte_tokenizer(), host_drafters=(Lookup(),))
    monkeypatch.setattr(options, "load_model", lambda *_, **__: lookup)
    assert main.run(["tune"]) == main.run(["tune", "--json"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert any("copies" in line for line in out)
    assert json.loads(out[-1])["tokens_per_step"] == 1.0
    assert bench.asked == 1


def test_the_statistics_line_says_when_it_decodes_plainly(
    bench: Bench, model: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.costs = DEAR
    redrafter = measured(drafted(model))
    print_answer(redrafter, "Hel", True, GenerationOptions(max_tokens=60), Terminal.standard())
    assert "decoding plainly: drafting does not pay here" in capsys.readouterr().err
    fixed = GenerationOptions(max_tokens=60, beam_width=2)
    print_answer(redrafter, "Hel", True, fixed, Terminal.standard())
    assert "plainly" not in capsys.readouterr().err
    assert shape_note(BeamShape(2, 4, 6), 4.25, 1.5) == "mostly W 2, L 4, N 4.25"
    assert shape_note(PLAIN, 1.0, 1.4) == "most steps plain"
    assert "lookup 80%" in str(shape_note(PLAIN, 1.0, 4.9, "lookup 80%")), "a few steps were long"
