"""`bench --compare`: two saved results, row by row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_runs import QUICK, SHAPES, loader  # noqa: F401
from command_line import CommandLine

from redrafter_mlx.bench.analyse.compare import compare, differing, read_result
from redrafter_mlx.errors import BadInputError

ROW = {
    "dtype": "auto", "method": "redrafter", "accept": "greedy", "temperature": 0.0,
    "beam_width": 2, "beam_length": 4, "max_nodes": None, "draft_tokens": None, "category": "all",
}  # fmt: skip


def figures(**values: tuple[float, float, float]) -> dict[str, object]:
    return {k: dict(zip(("median", "low", "high"), v, strict=True)) for k, v in values.items()}


def saved(tmp_path: Path, name: str, *rows: dict[str, object], **setup: object) -> Path:
    path = tmp_path / name
    path.write_text("table of old\n" + json.dumps({**setup, "rows": [*rows]}) + "\n")
    return path


def rows(**values: tuple[float, float, float]) -> list[dict[str, object]]:
    return [{**ROW, **figures(**values)}]


def test_two_results_differ_only_outside_their_intervals() -> None:
    a = rows(tps=(100, 98, 102), speedup=(1.5, 1.0, 2.0))
    b = rows(tps=(110, 108, 112), speedup=(1.6, 1.1, 2.1))
    tps, speedup = compare(a, b)
    assert tps.ratio.median == pytest.approx(1.1)
    assert 1.05 < tps.ratio.low < 1.1 < tps.ratio.high < 1.15
    assert tps.certain
    assert not speedup.certain
    back = compare(b, a)[0].ratio
    assert (back.low, back.high) == pytest.approx((1 / tps.ratio.high, 1 / tps.ratio.low))
    assert not compare(a, a)[0].certain


def test_rows_without_a_counterpart_are_counted(tmp_path: Path) -> None:
    a, b = rows(tps=(100, 98, 102)), rows(tps=(110, 108, 112))
    more = [*b, {**b[0], "beam_width": 3}, {**b[0], "beam_width": 4}]
    one, two = (read_result(saved(tmp_path, str(i), *r)) for i, r in enumerate((a, more)))
    assert differing(one, one) == []
    assert differing(one, two) == ["rows without a counterpart: 0, 2"]


def test_figures_measured_once_are_not_reported_as_different() -> None:
    a = rows(tps=(100, 100, 100), tokens_per_step=(1.5, 1.5, 1.5))
    b = rows(tps=(110, 110, 110), tokens_per_step=(1.5, 1.5, 1.5))
    tps, per_step = compare(a, b)
    assert not tps.certain
    assert (tps.verdict, per_step.verdict) == ("one run each", "within the spread")


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    good = saved(tmp_path, "a", *rows(tps=(100, 98, 102)))
    for text in ("", "no json", "[1]", "{}"):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(BadInputError, match="bench --json"):
            read_result(tmp_path / "bad")
    with pytest.raises(BadInputError, match="cannot read"):
        read_result(tmp_path / "none")
    with pytest.raises(BadInputError, match="no row in common"):
        compare(read_result(good).rows, [])


def test_every_setting_that_tells_rows_apart_is_shown(
    tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ways = (
        {}, {"prefixes": "final"}, {"epsilon": 0.25, "delta": 0.75}, {"max_nodes": 11},
        {"beam_length": None}, {"draft_tokens": 5, "beam_width": None, "beam_length": None},
    )  # fmt: skip
    figure = figures(tps=(100, 98, 102))
    saved(tmp_path, "a", *({**ROW, **way, **figure} for way in ways))
    out = cli.out("bench", "--compare", "a", "a")
    for part in ("prefixes final", "epsilon 0.25", "delta 0.75", "max nodes 11", "2 x auto",
                 "draft tokens 5"):  # fmt: skip
        assert out.count(part) == 1


def test_what_else_differs_between_two_results_is_noted(tmp_path: Path, cli: CommandLine) -> None:
    files = [
        str(saved(tmp_path, chip, *rows(tps=(100, 98, 102)), machine={"chip": chip, "cores": 8},
                  protocol={"max_tokens": tokens}, models=[{"model": "m", "bits": bits}]))
        for chip, tokens, bits in (("M1", 64, None), ("M2", 128, 4))
    ]  # fmt: skip
    a, b = map(read_result, files)
    assert differing(a, b) == [
        "machine chip: M1, M2", "protocol max_tokens: 64, 128", "model bits: None, 4",
    ]  # fmt: skip
    assert differing(a, a) == []
    assert "M1, M2" in cli.out("bench", "--compare", *files)
    assert cli.json("bench", "--compare", *files, "--json")["differences"] == differing(a, b)


def test_a_papers_table_is_compared_by_the_rows_it_was_made_from(tmp_path: Path) -> None:
    """Those of several prompt lengths are told apart."""
    file = tmp_path / "paper.json"
    results = [{"protocol": {"prompt_tokens": n}, "rows": rows(tps=(n, n, n))} for n in (64, 512)]
    file.write_text(json.dumps({"paper": {}, "results": results}))
    found = read_result(file).rows
    assert [row["prompt_tokens"] for row in found] == [64, 512]
    assert [change.ratio.median for change in compare(found, found)] == [1.0, 1.0]
    file.write_text(json.dumps({"paper": {}, "results": results[:1]}))
    other = saved(tmp_path, "a", *rows(tps=(64, 64, 64)))
    assert len(compare(read_result(file).rows, read_result(other).rows)) == 1


def test_results_are_compared(tmp_path: Path, cli: CommandLine) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(cli.out(*QUICK, *SHAPES, "--json"))
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert "tokens_per_step" in cli.out("bench", "--compare", *files)
    changes = cli.json("bench", "--compare", *files, "--json")["changes"]
    assert {c["figure"] for c in changes} == {"tps", "speedup", "tokens_per_step"}
    steps = [c for c in changes if c["figure"] == "tokens_per_step"]
    assert all(c["ratio"]["median"] == 1 and not c["certain"] for c in steps)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((), "cannot read /none"), (("--repeats", "2"), "--repeats"), (("--plot", "a.png"), "--plot")],
)
def test_a_comparison_that_cannot_be_made_is_refused(
    arguments: tuple[str, ...], named: str, cli: CommandLine
) -> None:
    assert named in cli.error("bench", "--compare", "/none", "/none", *arguments)
