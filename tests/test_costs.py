"""The cost model: keeps cliffs as measured and reports where they are; times persist on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from simulated import ROWS, SETUP, cliff, machine, timings

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.tuning.cost_model import cost_model
from redrafter_mlx.tuning.timings import Timings, saved_timings

COSTS, TIMINGS = machine(cliff(8)), timings(cliff(8))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("at", range(1, 32))
def test_a_cliff_stays_as_steep_as_it_was_measured(at: int) -> None:
    """Up to 17, every row count is measured; beyond, a cliff starts at the last measured one."""
    curves = machine(cliff(at))
    foot = max(r for r in ROWS if r <= at)
    head = min(r for r in ROWS if r > at)
    assert curves.verify(foot, 128) == pytest.approx((20 + 0.2 * foot) / 1e3)
    for rows in range(foot + 1, head + 1):
        assert curves.verify(rows, 128) == curves.verify(head, 128)
    assert curves.verify(head, 128) - curves.verify(foot, 128) > 0.02


@pytest.mark.parametrize("at", range(1, 32))
def test_the_cliff_that_is_there_is_found_and_no_other(at: int) -> None:
    ((rows, jump),) = machine(cliff(at)).cliffs().items()
    assert rows == max(r for r in ROWS if r <= at)
    assert jump > 0.5


def test_no_cliff_is_found_where_measurements_scatter_as_much() -> None:
    steps = machine(cliff(8, height=5.0))
    assert [*steps.cliffs()] == [8]
    assert replace(steps, spread=0.2).cliffs() == {}


def test_a_longer_context_costs_in_proportion_and_never_less() -> None:
    """The long context was measured at 2048 tokens and costs a fifth more than at 128."""
    short, middle, long = (COSTS.verify(4, c) for c in (128, 1088, 2048))
    assert long == pytest.approx(1.2 * short)
    assert middle == pytest.approx((short + long) / 2)
    assert COSTS.verify(4, 0) == short
    noisy = replace(COSTS, long=tuple((r, 0.9 * s) for r, s in COSTS.short))
    assert noisy.verify(4, 2048) == short


def test_few_rows_at_the_long_context_are_enough() -> None:
    """What context adds lies on straight lines between them: each node reads all of it."""
    sparse = replace(COSTS, long=tuple(p for p in COSTS.long if p[0] in (1, 8, 32)))
    one, four, eight, most = (
        sparse.verify(rows, 2048) - sparse.verify(rows, 128) for rows in (1, 4, 8, 32)
    )
    assert four == pytest.approx(one + (eight - one) * 3 / 7)
    assert sparse.verify(40, 2048) - sparse.verify(40, 128) == pytest.approx(most)


def test_drafting_lies_on_straight_lines_between_lengths() -> None:
    few = replace(COSTS, draft=tuple(p for p in COSTS.draft if p[1] in (2, 3, 8)))
    for width in range(1, 5):
        for length in range(2, 9):
            want = COSTS.drafting(width, length)
            assert few.drafting(width, length) == pytest.approx(want)
    assert few.drafting(1, 1) == 0.0
    assert few.drafting(8, 4) == pytest.approx(2 * few.drafting(4, 4))


def test_a_step_is_the_call_the_drafting_and_the_rest() -> None:
    shape = BeamShape(2, 4)
    want = COSTS.verify(7, 300) + COSTS.drafting(2, 4) + COSTS.tree_overhead
    assert COSTS.step(shape, 300) == want
    assert COSTS.step(PLAIN, 300) == COSTS.verify(1, 300) + COSTS.plain_overhead
    assert COSTS.step(BeamShape(2, 4, 5), 300) < want


def test_a_measured_time_replaces_the_assumed_one_and_no_other() -> None:
    """Assumed times are multiples of the one-row call's time, here the measured one."""
    assumed = cost_model(Timings(SETUP), "cpu", 4)
    seconds = {("call", 1, 128): 2.0, ("call", 4, 128): 9.0, ("draft", 2, 4): 3.0}
    known = cost_model(Timings(SETUP, seconds), "cpu", 4)
    assert (known.verify(4, 128), known.drafting(2, 4)) == (9.0, 3.0)
    for rows in (1, 2, 3, 8, 32):
        assert known.verify(rows, 128) == pytest.approx(2 * assumed.verify(rows, 128))
    assert cost_model(replace(TIMINGS, setup=SETUP), "cpu", 4) == COSTS


def test_drafting_is_assumed_as_a_share_of_a_call_until_any_of_it_is_measured() -> None:
    dear = cost_model(Timings(SETUP), "cuda", 4, level_cost=0.5)
    assert dear.drafting(1, 5) == pytest.approx(4 * 0.5 * dear.verify(1, 128))
    known = cost_model(Timings(SETUP, {("draft", 1, 2): 1.0}), "cuda", 4, level_cost=0.5)
    for width, length in ((1, 8), (4, 2), (4, 8)):
        assert known.drafting(width, length) == pytest.approx(2 * dear.drafting(width, length))


def test_what_context_adds_is_measured_with_few_calls() -> None:
    seconds = {("call", 1, 128): 1.0, ("call", 1, 2048): 3.0}
    known = cost_model(Timings(SETUP, seconds), "cuda", 4)
    for rows in (1, 4, 32):
        assert known.verify(rows, 2048) == pytest.approx(known.verify(rows, 128) + 2.0)


def test_times_survive_the_disk(cache: Path) -> None:
    assert saved_timings(SETUP) == Timings(SETUP)
    TIMINGS.save()
    assert saved_timings(SETUP) == TIMINGS
    assert [p.parent.name for p in cache.rglob("*.json")] == ["costs"]


@pytest.mark.parametrize("field", ["chip", "model", "drafter", "dtype", "mlx", "blas"])
def test_times_of_another_setup_are_not_used(field: str) -> None:
    TIMINGS.save()
    other = replace(SETUP, **{field: "another"})
    assert saved_timings(other) == Timings(other)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"setup": 1}', "\x00", "[" * 9**5])
def test_a_damaged_file_counts_as_none(content: str) -> None:
    TIMINGS.save()
    SETUP.path.write_text(content)
    assert saved_timings(SETUP) == Timings(SETUP)


@pytest.mark.parametrize(
    "changes",
    [
        {"spred": 1.0},
        {"setup": {"chip": "x"}},
        {"setup": 3},
        {"seconds": []},
        {"seconds": [["call", 2, 128, 0.1]]},
        {"seconds": [["call", 1, 128, -0.1]]},
        {"seconds": [["call", 1, 128, "fast"]]},
        {"seconds": [["call", 1, 128, 0.0]]},
        {"seconds": [["call", 1, 128]]},
        {"seconds": [["call", 1, 128, 0.1], ["draft", "x", 2, 0.1]]},
        {"seconds": [["call", 1, 128, 0.1], ["walk", 1, 2, 0.1]]},
        {"seconds": [["call", 1, 128, 0.1], ["draft", 1, 1, 0.1]]},
        {"seconds": [["call", 1, 128, 0.1], ["draft", 0, 2, 0.1]]},
        {"seconds": [["call", 1, 128, 0.1], ["call", -3, 128, 0.1]]},
        {"seconds": 7},
        {"spread": None},
        {"budget": "much"},
    ],
)
def test_values_that_are_no_times_count_as_none(changes: dict[str, object]) -> None:
    TIMINGS.save()
    stored = json.loads(SETUP.path.read_text())
    SETUP.path.write_text(json.dumps({**stored, **changes}))
    assert saved_timings(SETUP) == Timings(SETUP)
    SETUP.path.write_text(json.dumps(stored))
    assert saved_timings(SETUP) == TIMINGS


def test_a_file_under_the_wrong_name_counts_as_none() -> None:
    other = replace(SETUP, chip="another")
    replace(TIMINGS, setup=other).save()
    other.path.rename(SETUP.path)
    assert saved_timings(SETUP) == Timings(SETUP)


def test_a_cache_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "file"))
    TIMINGS.save()
    assert saved_timings(SETUP) == Timings(SETUP)


@pytest.mark.parametrize("complete", [False, True])
def test_processes_keep_each_others_measurements_and_the_shortest(
    complete: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that started before `tune` does not undo it."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    one, two, four = (("call", rows, 128) for rows in (1, 2, 4))
    earlier = Timings(SETUP, {one: 5.0, two: 1.5}, {one: 1, two: 2})
    Timings(SETUP, {one: 1.0, four: 2.0}, {one: 2, four: 1}, complete=complete).save()
    earlier.add_to_saved()
    found = saved_timings(SETUP)
    assert found.complete == complete
    assert found.seconds == {one: 1.0, four: 2.0} | ({} if complete else {two: 1.5})


def test_an_overhead_stays_with_the_one_row_call_that_it_was_measured_beside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A plain step takes 10 seconds in both files; the least of each would make it 8."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    call, rest, rest_of_trees = ("call", 1, 128), ("overhead", 1, 1), ("overhead", 2, 4)
    sides = {call: 10.0, rest: 0.0}, {call: 12.0, rest: -2.0, rest_of_trees: -6.0}
    for stored, mine in (sides, sides[::-1]):
        Timings(SETUP, dict(stored), complete=True).save()
        Timings(SETUP, dict(mine), complete=True).add_to_saved()
        assert saved_timings(SETUP).seconds == {call: 10.0, rest: 0.0, rest_of_trees: -5.0}


def test_drafting_at_no_cost_does_not_divide_by_it() -> None:
    timings = Timings(SETUP, {("call", 1, 128): 1.0, ("draft", 1, 2): 0.0})
    assert cost_model(timings, "cpu", 1, 0.0).drafting(1, 3) >= 0
