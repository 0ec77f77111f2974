"""The cost model: keeps cliffs as measured and reports where they are; times persist on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from simulated import ROWS, SETUP, cliff, machine

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.tuning.cost import CostModel, Setup, assumed_costs
from redrafter_mlx.tuning.store import Record, record_file, save_record, saved_record

COSTS = machine(cliff(8))


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


def test_a_step_is_the_call_and_the_drafting() -> None:
    shape = BeamShape(2, 4)
    want = COSTS.verify(7, 300) + COSTS.drafting(2, 4)
    assert COSTS.step(shape, 300) == want
    assert COSTS.step(PLAIN, 300) == COSTS.verify(1, 300)
    assert COSTS.step(BeamShape(2, 4, 5), 300) < want


@pytest.mark.parametrize("backend", ["cpu", "apple", "cuda", "another"])
def test_costs_are_assumed_in_units_of_a_one_row_call_until_they_are_measured(backend: str) -> None:
    assumed = assumed_costs(SETUP, backend, 4)
    assert assumed.assumed
    assert assumed.verify(1, 128) == 1.0
    assert assumed.verify(2, 128) <= assumed.verify(8, 128) < assumed.verify(32, 128)
    assert assumed.max_nodes == 32
    assert not COSTS.assumed


def test_drafting_is_assumed_as_a_share_of_a_call() -> None:
    dear = assumed_costs(SETUP, "cuda", 4, level_cost=0.5)
    assert dear.drafting(1, 5) == pytest.approx(4 * 0.5 * dear.verify(1, 128))
    assert dear.drafting(4, 5) > dear.drafting(1, 5)
    assert assumed_costs(SETUP, "cuda", 0).drafting(1, 5) == 0.0
    assert assumed_costs(SETUP, "cpu", 1, 0.0).drafting(1, 3) == 0.0
    block = assumed_costs(SETUP, "apple", 4, 0.01, block_cost=0.3)
    assert block.drafting(1, 2) == pytest.approx(0.31 * block.verify(1, 128))
    assert block.drafting(1, 8) < 1.3 * block.drafting(1, 2)


def test_what_context_adds_is_measured_with_few_calls() -> None:
    known = replace(COSTS, long=((1, COSTS.verify(1, 128) + 2.0),))
    for rows in (1, 4, 32):
        assert known.verify(rows, 2048) == pytest.approx(known.verify(rows, 128) + 2.0)


def save(costs: CostModel) -> bool:
    return save_record(costs.setup, Record(costs), "0", measured=True)


def saved(setup: Setup) -> CostModel | None:
    return saved_record(setup, "0").costs


def test_costs_survive_the_disk(cache: Path) -> None:
    assert saved(SETUP) is None
    assert save(COSTS)
    assert saved(SETUP) == COSTS
    assert [p.parent.name for p in cache.rglob("*.json")] == ["tuning"]


@pytest.mark.parametrize("field", ["chip", "model", "drafter", "dtype", "mlx", "blas"])
def test_times_of_another_setup_are_not_used(field: str) -> None:
    save(COSTS)
    other = replace(SETUP, **{field: "another"})
    assert saved(other) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"setup": 1}', "\x00", "[" * 9**5])
def test_a_damaged_file_counts_as_none(content: str) -> None:
    save(COSTS)
    record_file(SETUP).write_text(content)
    assert saved(SETUP) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"short": [[2, 0.1]]},
        {"short": [[1, -0.1]]},
        {"short": [[1, "fast"]]},
        {"short": [[1, 0.0]]},
        {"short": [[1]]},
        {"short": [[1, 0.1], [-3, 0.1]]},
        {"short": []},
        {"long": [[1, float("inf")]]},
        {"draft": [["x", 2, 0.1]]},
        {"draft": [[1, 1, 0.1]]},
        {"draft": [[0, 2, 0.1]]},
        {"draft": [[1, 2, -0.1]]},
        {"plain_overhead": 0.1},
        {"spread": float("nan")},
        {"walk": [[1, 2, 0.1]]},
        {"short": 7},
        {"spread": None},
    ],
)
def test_values_that_are_no_times_count_as_none(changes: dict[str, object]) -> None:
    save(COSTS)
    stored = json.loads(record_file(SETUP).read_text())
    changed = {**stored, "costs": {**stored["costs"], **changes}}
    for damaged in (changed, {**stored, "setup": {"chip": "x"}}, {**stored, "setup": 3}):
        record_file(SETUP).write_text(json.dumps(damaged))
        assert saved(SETUP) is None
    record_file(SETUP).write_text(json.dumps(stored))
    assert saved(SETUP) == COSTS


def test_a_file_under_the_wrong_name_counts_as_none() -> None:
    other = replace(SETUP, chip="another")
    save(replace(COSTS, setup=other))
    record_file(other).rename(record_file(SETUP))
    assert saved(SETUP) is None


def test_a_cache_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "file"))
    save(COSTS)
    assert saved(SETUP) is None
