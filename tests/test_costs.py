"""Cost curves: they keep the stairs, say where they are, and survive the disk or are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from simulated import ROWS, SETUP, cliff, machine

from redrafter_mlx.autotune.cost_model import CostCurves, saved_curves
from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.errors import BadInputError

CURVES = machine(cliff(8))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("at", range(1, 32))
def test_a_cliff_stays_as_steep_as_it_was_measured(at: int) -> None:
    """Up to 17 rows each is measured; behind that, the foot of a cliff is the last row measured."""
    curves = machine(cliff(at))
    foot = max(r for r in ROWS if r <= at)
    head = min(r for r in ROWS if r > at)
    assert curves.verify(foot, 128) == pytest.approx((20 + 0.2 * foot) / 1e3)
    for rows in range(foot + 1, head + 1):
        assert curves.verify(rows, 128) == curves.verify(head, 128)
    assert curves.verify(head, 128) - curves.verify(foot, 128) > 0.02


@pytest.mark.parametrize("at", range(1, 32))
def test_the_cliff_that_is_there_is_found_and_no_other(at: int) -> None:
    (found,) = machine(cliff(at)).cliffs()
    assert found.rows == max(r for r in ROWS if r <= at)
    assert found.jump > 0.5


def test_no_cliff_is_found_where_measurements_scatter_as_much() -> None:
    steps = machine(cliff(8, height=5.0))
    assert [c.rows for c in steps.cliffs()] == [8]
    assert replace(steps, spread=0.2).cliffs() == []


def test_a_longer_context_costs_in_proportion_and_never_less() -> None:
    """The long context was measured at 2048 tokens and costs a fifth more than at 128."""
    short, middle, long = (CURVES.verify(4, c) for c in (128, 1088, 2048))
    assert long == pytest.approx(1.2 * short)
    assert middle == pytest.approx((short + long) / 2)
    assert CURVES.verify(4, 0) == short
    noisy = replace(CURVES, long=tuple((r, 0.9 * s) for r, s in CURVES.short))
    assert noisy.verify(4, 2048) == short


def test_few_rows_at_the_long_context_are_enough() -> None:
    """What context adds to a row count is what it adds to the next one that was measured."""
    sparse = replace(CURVES, long=tuple(p for p in CURVES.long if p[0] in (1, 8, 32)))
    added = sparse.verify(8, 2048) - sparse.verify(8, 128)
    assert sparse.verify(5, 2048) - sparse.verify(5, 128) == pytest.approx(added)


def test_drafting_lies_on_straight_lines_between_lengths() -> None:
    few = replace(CURVES, draft=tuple(p for p in CURVES.draft if p[1] in (2, 3, 8)))
    for width in range(1, 5):
        for length in range(2, 9):
            want = CURVES.drafting(width, length)
            assert few.drafting(width, length) == pytest.approx(want)
    assert few.drafting(1, 1) == 0.0
    assert few.drafting(8, 4) == pytest.approx(2 * few.drafting(4, 4))


def test_a_step_is_the_call_the_drafting_and_the_rest() -> None:
    shape = BeamShape(2, 4)
    want = CURVES.verify(7, 300) + CURVES.drafting(2, 4) + CURVES.drafted_rest
    assert CURVES.step(shape, 300) == want
    assert CURVES.step(PLAIN, 300) == CURVES.verify(1, 300) + CURVES.plain_rest
    assert CURVES.step(BeamShape(2, 4, 5), 300) < want


def test_plain_decoding_is_padded_where_more_rows_are_clearly_cheaper() -> None:
    def cheap(seconds: float) -> CostCurves:
        return machine(lambda rows: {1: 20.0, 2: seconds}.get(rows, 30.0 + rows))

    assert CURVES.plain_rows(128) == 1
    assert cheap(19.0).plain_rows(128) == 1
    assert replace(cheap(15.0), spread=0.3).plain_rows(128) == 2  # who scatters more is no worse
    assert cheap(15.0).plain_rows(128) == 2
    assert cheap(15.0).step(PLAIN, 128) == pytest.approx((15.0 + 0.5) / 1e3)


def test_padding_ends_where_its_attention_costs_more_than_it_saves() -> None:
    """Two rows cost 15 ms and 20 at the long context, one 20 and 20."""
    short = ((1, 20e-3), (2, 15e-3), (4, 30e-3))
    curves = replace(CURVES, short=short, long=((1, 20e-3), (2, 20e-3), (4, 60e-3)))
    assert [curves.plain_rows(c) for c in (128, 1000, 2048, 8000)] == [2, 2, 1, 1]
    assert curves.step(PLAIN, 8000) == pytest.approx(20.5e-3)
    always = replace(curves, long=((1, 25e-3), (2, 15e-3), (4, 60e-3)))
    assert [always.plain_rows(c) for c in (2048, 2049)] == [2, 1], "not known to be so any longer"


def test_curves_survive_the_disk(cache: Path) -> None:
    assert saved_curves(SETUP) is None
    CURVES.save()
    assert saved_curves(SETUP) == CURVES
    assert [p.parent.name for p in cache.rglob("*.json")] == ["costs"]
    assert CostCurves.from_dict(json.loads(json.dumps(CURVES.to_dict()))) == CURVES


@pytest.mark.parametrize("field", ["chip", "model", "drafter", "dtype", "mlx", "blas"])
def test_curves_of_another_setup_are_not_used(field: str) -> None:
    CURVES.save()
    assert saved_curves(replace(SETUP, **{field: "another"})) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"setup": 1}', "\x00"])
def test_a_damaged_file_counts_as_none(content: str) -> None:
    CURVES.save()
    SETUP.path.write_text(content)
    assert saved_curves(SETUP) is None


def test_a_file_under_the_wrong_name_counts_as_none() -> None:
    replace(CURVES, setup=replace(SETUP, chip="another")).save()
    other = replace(SETUP, chip="another")
    other.path.rename(SETUP.path)
    assert saved_curves(SETUP) is None


def test_a_cache_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "file"))
    CURVES.save()
    assert saved_curves(SETUP) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"spred": 1.0}, "unknown cost key 'spred'; did you mean 'spread'"),
        ({"setup": {"chip": "x"}}, "cost key 'model' is missing"),
        ({"setup": 3}, "setup is 3"),
        ({"short": [[2, 0.1]]}, r"short has rows \[2\]"),
        ({"short": [[1, 0.1], [1, 0.2]]}, "must rise from 1"),
        ({"short": [[1, -0.1]]}, "holds -0.1"),
        ({"short": [[1, "fast"]]}, "holds 'fast'"),
        ({"short": [[1.5, 0.1]]}, "is 1.5; it must be a whole number"),
        ({"short": [[1, 0.0]]}, "holds 0.0"),
        ({"short": [[1]]}, "list of 2"),
        ({"long": 7}, "a cost curve is 7"),
        ({"draft": [[0, 2, 0.1]]}, "beam_width is 0"),
        ({"long_context": 1}, "contexts are 128 and 1"),
        ({"spread": None}, "spread holds None"),
    ],
)
def test_values_that_are_no_times_are_refused_by_name(changes: dict[str, object], why: str) -> None:
    with pytest.raises(BadInputError, match=why):
        CostCurves.from_dict({**CURVES.to_dict(), **changes})
    missing = CURVES.to_dict()
    del missing["draft"]
    with pytest.raises(BadInputError, match="cost key 'draft' is missing"):
        CostCurves.from_dict(missing)
