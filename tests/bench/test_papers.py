"""`bench --paper`: the published figures, the protocols, and the tables that they produce."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import mlx.core as mx
import pytest
from bench_samples import DRAFTED, answer
from command_line import CommandLine
from paper_samples import SOURCE, Paper, columns, loader, tiny_redrafter, trained_folder  # noqa: F401

from redrafter_mlx.bench.analyse.grid import grids
from redrafter_mlx.bench.analyse.summary import summarise
from redrafter_mlx.bench.measure.likelihood import likelihood
from redrafter_mlx.bench.measure.plan import resized
from redrafter_mlx.bench.options import BenchOptions
from redrafter_mlx.bench.paper_run import installed_drafters
from redrafter_mlx.bench.papers.answer_tables import (
    accepted_along,
    correlation,
    drafts_accepted,
    expected_tokens,
)
from redrafter_mlx.bench.papers.protocols import PROTOCOLS
from redrafter_mlx.bench.papers.published import CHIPS, authors_grid, published
from redrafter_mlx.cli import main, options
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.speculation.sampling import log_softmax


@pytest.mark.parametrize("chip", CHIPS)
def test_the_published_table_2_follows_from_its_authors_timings(chip: str) -> None:
    grid = authors_grid(chip, "float16")
    rows = [r for r in published("table2").records()
            if (r["machine"], r["target"]) == (CHIPS[chip], "Vicuna 7B")]  # fmt: skip
    assert [r["W"] for r in rows] == [1, 2, 3, 4]
    for row in rows:
        cell = grid.at(int(row["W"] or 0), 4)
        assert cell is not None
        figures = (cell.tps, cell.speedup, cell.tokens_per_step)
        assert figures == pytest.approx(
            (row["tok/s"], row["speedup"], row["tokens/step"]), abs=0.01
        )


def test_every_table_has_its_figures_or_says_what_is_not_at_hand() -> None:
    known = {field.name for field in fields(BenchOptions)}
    for protocol in PROTOCOLS:
        assert protocol.published.rows or protocol.published.missing
        assert all(len(row) == len(protocol.published.columns) for row in protocol.published.rows)
        assert set(protocol.options) <= known


def test_the_total_of_a_batch_is_its_requests_times_one() -> None:
    for row in published("table3").records():
        each, total, requests = row["tok/s each"], row["total tok/s"], row["requests"]
        assert total == (each if each == "OOM" else round(float(each or 0) * int(requests or 0), 2))


def test_the_macs_protocol_asks_one_question_in_every_shape(paper: Paper) -> None:
    """Options of the command line override the table's, even if they are `bench`'s defaults."""
    found = paper("table2", "--beam-width", "1..2", "--max-tokens", "6", "-r", "1",
                  "--warmup", "0", "--dtype", "float32")  # fmt: skip
    (result,) = found["results"]
    assert result["protocol"]["asked"] == 1
    assert result["protocol"]["max_tokens"] == 6
    (measured,) = found["paper"]["measured"]
    shapes = [(str(W), str(L)) for W in (1, 2) for L in (2, 3, 4, 5)]
    assert columns(measured, "W", "L") == shapes
    changed = {d["what"]: d["here"] for d in found["paper"]["differences"]}
    assert changed["--beam-width"] == "1..2"
    assert "--beam-length" not in changed


def test_methods_are_every_drafter_that_is_here_by_the_questions_category(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The categories of AlpacaEval are the values of its key `dataset`."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    assert installed_drafters("smollm2-135m") == ("trained", "lookup", "auto")
    path = tmp_path / "alpaca_eval.json"
    asked = [
        {"instruction": "one", "dataset": "koala"},
        {"instruction": "two", "dataset": "vicuna"},
    ]
    path.write_text(json.dumps(asked))
    found = paper("table1", "--questions", str(path), "--max-tokens", "6",
                  "--drafter", "trained")  # fmt: skip
    (measured,) = found["paper"]["measured"]
    assert columns(measured, "questions", "asked") == [
        ("all", "2"),
        ("koala", "1"),
        ("vicuna", "1"),
    ]


def test_an_option_wins_though_it_says_what_bench_does_without_it(
    paper: Paper, questions: list[str]
) -> None:
    line = ["table2", "--beam-width", "1", "--beam-length", "2", *questions, "--repeats", "3"]
    found = paper(*line, "--max-tokens", "128", "--limit", "1", "--temperature", "0")
    assert found["results"][0]["protocol"]["max_tokens"] == 128


def test_merging_is_counted_beside_candidates_that_are_verified_separately(
    paper: Paper, questions: list[str]
) -> None:
    found = paper("figure6", *questions, "--beam-width", "6,70")
    (measured,) = found["paper"]["measured"]
    rows = {(W, p): (float(before), float(n)) for W, p, before, n in columns(
        measured, "W", "prefixes", "tokens in beams", "median")}  # fmt: skip
    assert {p for _, p in rows} == {"separate", "final", "all"}
    calls = {(W, p): float(n) for W, p, n in columns(measured, "W", "prefixes", "query rows")}
    for W in (6, 70):
        assert rows[str(W), "separate"] == (5 * W, 4 * W + 1)
        assert rows[str(W), "final"][1] < 4 * W + 1
        assert calls[str(W), "final"] < calls[str(W), "separate"] == calls[str(W), "all"]
        assert rows[str(W), "final"][1] <= calls[str(W), "final"]
    assert all(row["matches_baseline"] for row in found["results"][0]["rows"])


def test_a_heatmap_holds_shapes_that_were_packed_in_one_way() -> None:
    methods = [replace(DRAFTED, beam_width=W, prefixes=prefixes)
               for W in (1, 2) for prefixes in ("separate", "final")]  # fmt: skip
    found = grids(summarise([answer(), *(answer(m, nodes=(4, 4, 4)) for m in methods)]))
    assert [grid.title for grid in found] == ["float32, separate, greedy", "float32, final, greedy"]
    assert [[cell.beam_width for cell in grid.cells] for grid in found] == [[1, 2], [1, 2]]


def test_a_texts_likelihood_is_that_of_its_tokens_one_by_one() -> None:
    redrafter = tiny_redrafter()
    prompt, tokens = [5, 6, 7], [8, 200, 31]
    found = likelihood(redrafter, prompt, tokens)
    assert found is not None
    chosen, entropies = [], []
    for at, token in enumerate(tokens):
        row = log_softmax(redrafter.model(mx.array([prompt + tokens[:at]]))[0, -1])
        chosen.append(row[token].item())
        entropies.append(-mx.sum(mx.exp(row) * row).item())
    assert found.log_likelihood == pytest.approx(sum(chosen) / 3, abs=1e-4)
    assert found.entropy == pytest.approx(sum(entropies) / 3, abs=1e-4)
    assert likelihood(redrafter, prompt, []) is None


def test_acceptance_methods_are_crossed_with_their_own_axes_alone(
    paper: Paper, questions: list[str]
) -> None:
    found = paper("v1-table2", *questions, "--temperature", "0,1", "--delta", "0.3")
    (measured,) = found["paper"]["measured"]
    drafted = [row[1:] for row in columns(measured, "method", "accept", "T", "epsilon", "delta")
               if row[0] == "redrafter"]  # fmt: skip
    assert drafted == [("greedy", "0", "", ""), ("rejection", "1", "", ""),
                       ("typical", "1", "0.09", "0.3"), ("typical", "1", "0.3", "0.3")]  # fmt: skip
    by_temperature = columns(measured, "T", "as greedy", "log-likelihood")
    greedy = [row for row in by_temperature if row[0] == "0"]
    assert {row[1] for row in greedy} == {"100.0%"}
    assert len({row[2] for row in greedy}) == 1


@pytest.mark.parametrize("table", ["v1-table2", "assistant"])
def test_what_one_rank_alone_would_compute_is_refused_under_a_launch(
    table: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch,
    questions: list[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setenv("MLX_HOSTFILE", "hosts.json")
    out, err = cli.run("bench", "--paper", table, *questions, "--drafter", "x", status=1)
    assert (out, err.count("\n")) == ("", 1)
    assert "mlx.launch" in err or "ranks" in err


def test_requests_at_once_have_prompts_and_answers_of_the_lengths_asked_for(
    paper: Paper, questions: list[str]
) -> None:
    """Even if the model would end some answers earlier."""
    found = paper("speculators-table1", *questions, "--prompt-tokens", "9,30",
                  "--batch-size", "1,2", "--beam-width", "2", "--max-tokens", "40")  # fmt: skip
    (measured,) = found["paper"]["measured"]
    cases = columns(measured, "prompt tokens", "requests")
    assert {length for length, _ in cases} == {"9", "30"}
    assert {size for _, size in cases} == {"1", "2"}
    changed = {d["what"]: d["here"] for d in found["paper"]["differences"]}
    assert changed["--prompt-tokens"] == "9,30"
    for ms, per_second in zip(
        columns(measured, "ms a token"),
        (row["request_tps"]["median"] for result in found["results"] for row in result["rows"]),
        strict=True,
    ):
        assert float(ms[0]) == pytest.approx(1000 / per_second, abs=0.06)


def test_answers_are_as_long_as_asked_if_their_end_is_ignored(
    capsys: pytest.CaptureFixture[str], questions: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In every method; otherwise the model ends these answers with their first token."""

    def ending(*_: object, **__: object) -> Redrafter:
        made = tiny_redrafter()
        prompt = made.encode([{"role": "user", "content": "one"}])
        made.tokenizer.eos_token_ids = made.generate(prompt, max_tokens=3).token_ids[:1]
        return made

    monkeypatch.setattr(options, "load_model", ending)
    counts = {}
    for more in ((), ("--ignore-eos",)):
        file = tmp_path / f"answers{len(more)}.jsonl"
        assert main.run(["bench", *questions, "--limit", "1", "-r", "1", "--warmup", "0", *more,
                         "--max-tokens", "20", "--answers", str(file)]) == 0  # fmt: skip
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        counts[more] = {len(line["token_ids"]) for line in lines}
        assert len(lines) == 3
    assert counts == {(): {1}, ("--ignore-eos",): {20}}
    assert main.run(["bench", *questions, "--limit", "1", "-r", "1", "--warmup", "0",
                     "--max-tokens", "20", "--answers", str(file)]) == 1  # fmt: skip
    assert "ignore_eos" in capsys.readouterr().err


def test_prompts_and_answers_that_the_context_cannot_hold_are_refused(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, questions: list[str]
) -> None:
    def short(*_: object, **__: object) -> Redrafter:
        made = tiny_redrafter()
        made.prompts.context_length = 60
        return made

    monkeypatch.setattr(options, "load_model", short)
    line = ["bench", *questions, "-r", "1", "--beam-width", "1", "--beam-length", "2"]
    assert "context of 60" in cli.error(*line, "--prompt-tokens", "55")
    assert main.run([*line, "--prompt-tokens", "54", "--limit", "1"]) == 0


def test_a_prompt_is_repeated_and_cut_to_its_length() -> None:
    assert resized([1, 2, 3], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert resized([1, 2, 3], 2) == [2, 3]
    assert resized([], 2) == []


def test_accepted_drafts_are_counted_where_their_step_began() -> None:
    """The first token comes from the prefill; 33 tokens precede the third step."""
    one = answer(DRAFTED, lengths=(30, 2, 2, 3))
    assert accepted_along([one]) == {1: [29, 1], 33: [1, 2]}
    assert accepted_along([one, one])[33] == [1, 2, 1, 2]


def test_tokens_a_second_are_measured_over_batch_sizes_for_no_drafts_and_several_beams(
    paper: Paper, questions: list[str]
) -> None:
    """Each and in total; of the sizes, those that there are prompts for."""
    found = paper("v1-figure6a", *questions)
    (measured,) = found["paper"]["measured"]
    cases = set(columns(measured, "W", "requests"))
    assert cases == {(W, n) for W in ("mlx-lm", "no drafts", "auto", "1", "4", "16")
                     for n in ("1", "2")}  # fmt: skip
    assert {"tok/s each", "total tok/s"} <= {*measured["columns"]}


def test_expected_tokens_are_those_of_drafts_that_fail_independently() -> None:
    """Three drafts that are accepted with probability 1/2 each: 1 + 1/2 + 1/4 + 1/8."""
    assert expected_tokens(0.5, 3) == 1.875
    assert expected_tokens(1.0, 4) == 5
    # 3 drafts per step: 3, 1, 0 and 3 are accepted of the 3, 2, 1 and 3 that are reached.
    drafted = answer(DRAFTED, lengths=(4, 2, 1, 4))
    (row,) = [r for r in summarise([drafted]) if r.category == "all"]
    assert drafts_accepted(row) == pytest.approx(7 / 9)


def test_drafters_are_told_apart_by_how_they_were_trained(
    paper: Paper, questions: list[str], tmp_path: Path
) -> None:
    """By their options files; published figures appear in the rows with the same labels."""
    given, own = (trained_folder(tmp_path / labels, labels, rate)
                  for labels, rate in (("data", 0.001), ("target", 0.004)))  # fmt: skip
    line = [*questions, "--limit", "1", "--drafter", given, "--drafter", own, "--warmup", "0"]
    found = paper("table4", *line, "--beam-width", "2,16", "--max-tokens", "3")
    (measured,) = found["paper"]["measured"]
    assert columns(measured, "drafter", "labels", "W", "published") == [
        (given, "data", "2", "1.52x, 2.31"), (given, "data", "16", "1.80x, 2.87"),
        (own, "target", "2", "1.60x, 2.50"), (own, "target", "16", "1.92x, 3.09"),
    ]  # fmt: skip
    found = paper("v1-figure4", *line, "--beam-width", "2", "--max-tokens", "3")
    (measured,) = found["paper"]["measured"]
    rates = columns(measured, "form", "learning rate")
    assert rates == [("recurrent", "0.001"), ("recurrent", "0.004")]


def test_a_draft_models_expected_speedup_follows_from_its_acceptance_and_its_cost(
    paper: Paper, questions: list[str]
) -> None:
    """It follows by the formula from the rounded figures in its row."""
    line = [*questions, "--drafter", "x", "--beam-length", "3", "--temperature", "0,1"]
    found = paper("assistant", *line, "--warmup", "0")
    (measured,) = found["paper"]["measured"]
    cases = columns(measured, "T", "accept", "drafts")
    assert cases == [("0", "greedy", "2"), ("1", "rejection", "2")]
    names = ("accepted", "c", "expected tokens/step", "expected speedup")
    for accepted, cost, expected, speedup in columns(measured, *names):
        a, c = float(accepted.rstrip("%")) / 100, float(cost)
        assert c > 0
        assert float(expected) == pytest.approx(1 + a + a * a, abs=0.01)
        assert float(speedup.rstrip("x")) == pytest.approx(float(expected) / (1 + 2 * c), abs=0.02)


def test_a_correlation_needs_three_drafters() -> None:
    assert correlation([(1, 2), (2, 4)]) is None
    assert correlation([(1, 2), (1, 4), (1, 5)]) is None
    assert correlation([(1, 2), (2, 4), (3, 6)]) == pytest.approx(1.0)
    assert correlation([(1, 6), (2, 4), (3, 2)]) == pytest.approx(-1.0)


def test_accuracy_by_position_is_read_from_a_runs_log(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder may be in the home folder."""
    quality = {"tokens_per_step": {"1": 1.4}, "accepted": {"1": [0.3]}, "best": True}
    events = [
        {"event": "step", "step": 2, "loss": 5.125, "seconds": 1.0},
        {"event": "evaluation", "step": 2, "top1": [0.5, 0.25], "top5": [0.75, 0.5],
         "training_top1": [0.625, 0.375], "seconds": 2.0, **quality},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    for folder in (str(tmp_path), f"~/{tmp_path.name}"):
        found = paper("v1-figure3", "--drafter", folder)
        (measured,) = found["paper"]["measured"]
        assert measured["rows"] == [[folder, "2", "5.125", "62.5% / 50.0%", "37.5% / 25.0%"]]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--paper", "tabel2"], "table2"),
        (["--paper", "table4"], "2 times --drafter"),
        (["--paper", "v1-figure3"], "--drafter"),
        (["--paper", "v1-figure3", "--drafter", "/none"], "/none"),
        (["--paper", "v1-figure3", "--drafter", "x", "--limit", "2"], "--limit"),
        (["--paper", "table2", "--batch-size", "2"], "--batch-size"),
        (["--paper", "table2", "--report", "folder"], "--report"),
        (["--paper", "table1", "--drafter", "x", "--limit", "1", "--plot", "a.png"], "--plot"),
        (["--epsilon", "0.1"], "--epsilon"),
        (["--delta", "x", "--accept", "typical", "--temperature", "1"], "--delta"),
        (["--prompt-tokens", "1,2"], "--prompt-tokens"),
        (["--prompt-tokens", "0"], "--prompt-tokens"),
        (["--prefixes", "final,none"], "none"),
        (["--prefixes", "separate", "--beam-width", "2", "--max-nodes", "3"], "max_nodes"),
    ],
)
def test_a_table_that_cannot_be_measured_is_refused_in_one_line(
    arguments: list[str], named: str, cli: CommandLine
) -> None:
    assert named in cli.error("bench", *arguments)
