"""`bench --paper` beside options of the user's own: what is measured, refused, shown and noted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_samples import DRAFTED, PLAIN, answer
from command_line import CommandLine
from paper_samples import ONCE, SOURCE, Paper, columns, loader, tiny_redrafter, trained_folder  # noqa: F401
from tiny import byte_model, byte_tokenizer, random_drafter

from redrafter_mlx.bench import models as bench_models
from redrafter_mlx.bench.analyse.summary import Row, summarise
from redrafter_mlx.bench.checks import check_measurement
from redrafter_mlx.bench.measure.answers import Answer
from redrafter_mlx.bench.measure.methods import Method
from redrafter_mlx.bench.measure.runner import Run, Runner
from redrafter_mlx.bench.options import BenchOptions
from redrafter_mlx.bench.paper_run import fill, installed_drafters
from redrafter_mlx.bench.papers.columns import Layout, paper_table, settings_of
from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.papers.protocols import find_protocol
from redrafter_mlx.cli import main, options
from redrafter_mlx.drafting.recurrent import save_drafter
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.loading.target import LoadedTarget
from redrafter_mlx.weights.registry import DEFAULT_MODEL, REGISTRY


def rows_of(*answers: Answer) -> list[Row]:
    return [row for row in summarise(answers) if row.category == "all"]


def test_every_option_that_changes_a_table_is_listed(paper: Paper, questions: list[str]) -> None:
    given = {"--temperature": "0.5", "--accept": "rejection", "--beam-width": "1",
             "--drafter": "x", "--warmup": "0"}  # fmt: skip
    words = [word for pair in given.items() for word in pair]
    found = paper("table2", *questions, *words, "--beam-length", "2..5", "--limit", "1",
                  "--seed", "3")  # fmt: skip
    listed = {d["what"]: (d["paper"], d["here"]) for d in found["paper"]["differences"]}
    assert {name: here for name, (_, here) in listed.items() if name.startswith("--")} == {
        **given, "--max-tokens": "6", "--dtype": "float32",
    }  # fmt: skip
    assert listed["--temperature"][0] == "bench's default"
    assert listed["--beam-width"][0] == "without it: 1..4"


def test_a_table_has_a_column_for_each_setting_that_varies() -> None:
    methods = [PLAIN, DRAFTED, replace(DRAFTED, beam_width=3),
               replace(DRAFTED, temperature=0.5, accept="typical", epsilon=0.25)]  # fmt: skip
    lines = [(settings_of(method), {"method": method.name}.__getitem__) for method in methods]
    table = paper_table(Layout("t", "method", "note"), lines)
    assert table.columns == ("method", "T", "accept", "W")
    assert table.rows[0] == ("mlx-lm", "0", "", "")
    assert table.rows[3] == ("redrafter", "0.5", "typical", "2")
    own = [(settings, {"T": "x", "accept": "x"}.__getitem__) for settings, _ in lines]
    assert paper_table(Layout("t", "T, accept", covers=("W",)), own).columns == ("T", "accept")
    both = [(settings_of(DRAFTED, dtype), {"": ""}.__getitem__) for dtype in ("float16", "4bit")]
    assert paper_table(Layout("t", ""), both).rows == (("float16",), ("4bit",)), "none is empty"
    assert paper_table(Layout("t", ""), []).columns == ("nothing was measured",)


def test_a_table_by_hand_tells_its_shapes_and_temperatures_apart(
    paper: Paper, questions: list[str]
) -> None:
    found = paper("table1", *questions, *ONCE, "--drafter", "x", "--beam-width", "1,2",
                  "--beam-length", "2", "--temperature", "0,1")  # fmt: skip
    (measured,) = found["paper"]["measured"]
    assert columns(measured, "T", "accept", "W") == [
        ("0", "greedy", "1"), ("0", "greedy", "2"), ("1", "sample", "1"), ("1", "sample", "2"),
    ]  # fmt: skip
    assert "L" not in measured["columns"]


def test_mlx_lms_speculative_decoding_is_one_of_the_methods(
    cli: CommandLine, paper: Paper, monkeypatch: pytest.MonkeyPatch, questions: list[str]
) -> None:
    """In the tables that have rows for it; the others refuse its option."""
    draft = LoadedTarget.of(byte_model(), byte_tokenizer(), SOURCE)
    monkeypatch.setattr(bench_models, "load_target", lambda *_, **__: draft)
    asked = [*questions, *ONCE, "--draft-model", "m", "--drafter", "x"]
    found = paper("table1", *asked, "--num-draft-tokens", "2,3")
    (measured,) = found["paper"]["measured"]
    assert columns(measured, "drafter") == [
        ("mlx-lm speculative (2 drafts)",), ("mlx-lm speculative (3 drafts)",), ("",),
    ]  # fmt: skip
    for table in ("table2", "table3", "figure6"):
        out, err = cli.run("bench", "--paper", table, *asked, status=1)
        assert (out, err.count("\n")) == ("", 1)
        assert f"--paper {table} has no use for --draft-model" in err


@pytest.mark.parametrize(
    ("table", "given", "kept"),
    [
        ("v1-table2", {"temperature": "0"}, {"accept": None, "epsilon": None, "delta": None}),
        ("v1-table2", {"accept": "rejection"}, {"epsilon": None, "delta": None}),
        ("v1-table2", {"accept": "typical", "delta": "0.5"}, {"epsilon": "0.09,0.3"}),
        ("assistant", {"temperature": "0"}, {"accept": "greedy"}),
        ("assistant", {"temperature": "1"}, {"accept": "rejection"}),
        ("figure6", {"max_nodes": 9}, {"prefixes": "final,all"}),
        ("figure6", {"accept": "rejection", "temperature": "1"}, {"prefixes": "all"}),
        ("table3", {"limit": 3}, {"batch_size": "1,2"}),
    ],
)
def test_options_of_a_table_that_no_longer_apply_are_dropped(
    table: str, given: dict[str, object], kept: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "questions").write_text("one\ntwo\nthree\nfour\n")
    given = {"questions": (str(tmp_path / "questions"),), "drafter": ("x",), **given}
    asked = BenchOptions(**given)  # type: ignore[arg-type]
    found = fill(find_protocol(table), asked, given)
    assert {name: getattr(found, name) for name in kept} == kept
    check_measurement(found)


@pytest.mark.parametrize("table", ["table3", "speculators-table1"])
def test_a_table_that_fails_says_why(
    table: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch,
    questions: list[str],
) -> None:  # fmt: skip
    honest = Runner.run_together

    def wrong(self: Runner, method: Method, *given: Any) -> list[Run]:
        runs = honest(self, method, *given)
        if method.ours:
            runs[0].token_ids[-1] += 1
        return runs

    monkeypatch.setattr(Runner, "run_together", wrong)
    line = [*questions, "--batch-size", "1", "-r", "1", "--beam-width", "2", "--drafter", "x"]
    out = cli.run("bench", "--paper", table, *line, "--prompt-tokens", "9", status=1).out
    assert out.count("please report it") == 1


def test_prompts_of_several_lengths_are_measured_with_one_loading(
    cli: CommandLine, paper: Paper, monkeypatch: pytest.MonkeyPatch, questions: list[str]
) -> None:
    """What the context cannot hold is refused before anything is measured."""
    loaded: list[object] = []

    def short(*asked: object, **_: object) -> Redrafter:
        loaded.append(asked)
        made = tiny_redrafter()
        made.prompts.context_length = 60
        return made

    monkeypatch.setattr(options, "load_model", short)
    line = [*questions, "--batch-size", "1", "--beam-width", "2", "--limit", "1"]
    assert paper("speculators-table1", *line, "--prompt-tokens", "9,30")
    assert len(loaded) == 1

    def never(*_: object) -> list[Run]:
        raise AssertionError("measured")

    monkeypatch.setattr(Runner, "run_together", never)
    asked = ["bench", "--paper", "speculators-table1", *line, "--prompt-tokens", "9,55"]
    assert "--prompt-tokens 55" in cli.error(*asked)


def test_an_interrupted_table_of_lengths_keeps_what_was_finished(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, questions: list[str]
) -> None:
    honest = Runner.run_together

    def impatient(self: Runner, method: Method, prompts: list[list[int]], *more: Any) -> list[Run]:
        if len(prompts[0]) == 30:
            raise KeyboardInterrupt
        return honest(self, method, prompts, *more)

    monkeypatch.setattr(Runner, "run_together", impatient)
    line = [*questions, "--batch-size", "1", "--beam-width", "2", "--prompt-tokens", "9,30"]
    assert main.run(["bench", "--paper", "speculators-table1", *line]) == 130
    out = capsys.readouterr().out
    assert "ms a token" in out
    assert out.count("interrupted: ") == 1


def test_published_figures_stand_beside_the_same_dtype() -> None:
    shape = Method("redrafter", 0.0, "greedy", 1, 4)
    rows = rows_of(*(answer(shape, dtype=dtype) for dtype in ("float16", "bfloat16", "4bit")))
    table = find_protocol("table2").measured(Evidence(rows=rows))
    cells = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    seven = [row["M2 Ultra, Vicuna 7B"] for row in cells]
    assert [bool(figure) for figure in seven] == [True, True, False]
    assert seven[0].startswith("57.14, 1.43x")
    tokens, plain, whole, prompt = 200, (5.1684 + 5.1692) / 2, 4.2817, (0.1963 + 0.2242) / 2
    drafted = whole - prompt
    assert seven[1] == f"{tokens / drafted:.2f}, {plain / drafted:.2f}x, {tokens / 101:.2f}"
    assert [bool(row["M2 Ultra, Vicuna 33B"]) for row in cells] == [True, False, False]


def test_acceptance_and_speed_correlate_over_drafters_measured_in_the_same_way() -> None:
    """In float16 the faster drafter accepts more, in 4 bits less."""
    answers = []
    for dtype, way in (("float16", 1), ("4bit", -1)):
        for i, name in enumerate("abc"):
            answers.append(
                answer(replace(DRAFTED, drafter=name, beam_length=2), dtype=dtype,
                       seconds=10 / (1 + i) ** way, lengths=[2] * (1 + i) + [1] * (5 - i))
            )  # fmt: skip
    table = find_protocol("v1-figure4").measured(Evidence(rows=rows_of(*answers)))
    assert "over 3 drafters, dtype float16: " in table.note
    assert "over 3 drafters, dtype 4bit: " in table.note
    first, second = (float(part.rsplit(" ", 1)[1]) for part in table.note.split(";")[1:])
    assert first > 0.9
    assert second < 0
    table = find_protocol("v1-figure4").measured(Evidence(rows=rows_of(*answers[:3])))
    assert "over 3 drafters: " in table.note


def test_each_drafter_on_this_machine_is_measured_once_and_damaged_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trained` takes the first that can be loaded, so it is no name for one of several."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    pinned = REGISTRY[DEFAULT_MODEL].pinned
    assert pinned is not None
    fingerprint = f"sha256:{pinned.sha256}"
    mine = tmp_path / "drafters" / "mine"
    save_drafter(random_drafter(1, target_fingerprint=fingerprint), mine)
    first, shipped, *others = installed_drafters(DEFAULT_MODEL)
    assert (first, others) == (str(mine), ["lookup", "auto"])
    assert shipped != "trained"
    (mine / "model.safetensors").write_text("damaged")
    assert installed_drafters(DEFAULT_MODEL) == ("trained", "lookup", "auto")


def test_labels_are_those_of_the_folder_that_was_loaded(
    cli: CommandLine, paper: Paper, questions: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of the drafter that was trained for the target, and of one together with prompt lookup."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))
    other = trained_folder(tmp_path / "other", "target", 0.004)
    mine = tmp_path / "cache" / "drafters" / "mine"
    trained_folder(mine, "data", 0.001)
    save_drafter(random_drafter(2, vocab_size=258, target_fingerprint=SOURCE.fingerprint), mine)
    drafters = ["--drafter", f"{other}+lookup", "--drafter", "trained"]
    found = paper("table4", *questions, *ONCE, *drafters, "--beam-width", "2")
    (measured,) = found["paper"]["measured"]
    assert columns(measured, "drafter", "labels") == [(f"{other}+lookup", "target"),
                                                      ("trained", "data")]  # fmt: skip
    assert "2 times --drafter" in cli.error(
        "bench", "--paper", "table4", "--drafter", "a", "--drafter", "a"
    )
