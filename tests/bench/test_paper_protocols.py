"""What the protocols of `bench --paper` measure, beyond one request at a time in one turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from command_line import CommandLine
from paper_samples import ONCE, SOURCE, Paper, columns, loader, tiny_redrafter, trained_folder  # noqa: F401

from redrafter_mlx.bench.measure.methods import Method
from redrafter_mlx.bench.measure.runner import Run, Runner
from redrafter_mlx.bench.papers.published import published
from redrafter_mlx.bench.papers.report import published_table
from redrafter_mlx.cli import main, options
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions


def test_a_batch_that_does_not_fit_in_memory_is_a_cell(
    paper: Paper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in the paper; smaller beams of that size, and that beam in smaller batches, have times."""

    def small(*_: object, **__: object) -> Redrafter:
        made = tiny_redrafter()
        limits = EngineOptions(memory_bytes=mx.get_active_memory() + 5_000_000, max_batch=20)
        return Redrafter(made.model, made.tokenizer, made.drafter, source=SOURCE, engine=limits)

    monkeypatch.setattr(options, "load_model", small)
    path = tmp_path / "questions"
    path.write_text("".join(f"question {n}\n" for n in range(20)))
    found = paper("table3", "--questions", str(path), "--max-tokens", "4", "--dtype",
                  "float32", "--batch-size", "1,20", "--beam-width", "2,64")  # fmt: skip
    (measured,) = found["paper"]["measured"]
    cells = {(W, n): cell for W, n, *cell in columns(
        measured, "W", "requests", "tok/s each", "total tok/s", "tokens/step")}  # fmt: skip
    assert cells["64", "20"] == ["OOM", "OOM", ""]
    assert [key for key, cell in cells.items() if "OOM" in cell] == [("64", "20")]
    (result,) = found["results"]
    assert [row["batch_size"] for row in result["rows"] if row["out_of_memory"]] == [20]


def test_a_device_that_runs_out_of_memory_ends_one_case_and_other_failures_the_run(
    paper: Paper, monkeypatch: pytest.MonkeyPatch, questions: list[str]
) -> None:
    honest, why = Runner.run_together, "[malloc_or_wait] Unable to allocate 99 bytes."

    def failing(self: Runner, method: Method, *given: Any) -> list[Run]:
        if method.beam_width == 2:
            raise RuntimeError(why)
        return honest(self, method, *given)

    monkeypatch.setattr(Runner, "run_together", failing)
    line = [*questions, "--batch-size", "1", "--beam-width", "1,2", "--prompt-tokens", "9"]
    found = paper("speculators-table1", *line)
    (measured,) = found["paper"]["measured"]
    cells = dict(columns(measured, "k", "ms a token"))
    assert [k for k, cell in cells.items() if cell == "OOM"] == ["2"]
    why = "another failure"
    with pytest.raises(RuntimeError, match="another"):
        main.run(["bench", "--paper", "speculators-table1", *line])


def test_both_turns_of_a_conversation_are_asked_with_the_first_answer_between_them(
    paper: Paper, tmp_path: Path
) -> None:
    path, file = tmp_path / "mt_bench.jsonl", tmp_path / "answers.jsonl"
    path.write_text('{"question_id": 81, "category": "writing", "turns": ["one", "and then?"]}\n'
                    '{"question_id": 82, "category": "math", "turns": ["two"]}\n')  # fmt: skip
    line = ["--questions", str(path), "--max-tokens", "6", "--beam-width", "2", "--drafter", "x",
            "--answers", str(file), "--warmup", "0"]  # fmt: skip
    found = paper("v1-figure5a", *line)
    answers = [json.loads(text) for text in file.read_text().splitlines()]
    prompts = {answer["question_id"]: answer["prompt_ids"] for answer in answers}
    first = next(a for a in answers if (a["question_id"], a["method"]["name"]) == (81, "mlx-lm"))
    said = [{"role": "user", "content": "one"},
            {"role": "assistant", "content": first["choices"][0]["turns"][0]},
            {"role": "user", "content": "and then?"}]  # fmt: skip
    assert set(prompts) == {81, "81, turn 2", 82}
    assert prompts["81, turn 2"] == tiny_redrafter().encode(said)
    assert found["results"][0]["protocol"]["questions"] == f"{path}, 2 turns of each"
    assert paper("v1-figure5a", *line)["paper"] == found["paper"], "it resumes"
    plain = tmp_path / "plain.jsonl"
    assert main.run(["bench", *line[:-4], *ONCE, "--answers", str(plain)]) == 0
    assert {json.loads(text)["question_id"] for text in plain.read_text().splitlines()} == {81}


def test_every_drafter_answers_greedily_and_by_typical_acceptance(
    paper: Paper, questions: list[str]
) -> None:
    """With its number of parameters: a random one of a tiny model has few."""
    found = paper("v1-table1", *questions, *ONCE, "--drafter", "a", "--drafter", "lookup",
                  "--beam-width", "2", "--beam-length", "3")  # fmt: skip
    (measured,) = found["paper"]["measured"]
    cases = columns(measured, "drafter or method", "accept", "T")
    assert {("a", "greedy", "0"), ("a", "typical", "0.7"), ("lookup", "greedy", "0"),
            ("lookup", "typical", "0.7"), ("mlx-lm", "", "0")} <= set(cases)  # fmt: skip
    sizes = dict(columns(measured, "drafter or method", "size"))
    assert sizes["a"].endswith("M")
    assert sizes["lookup"] == sizes["mlx-lm"] == ""
    assert "drafter" not in measured["columns"]


def test_the_rows_of_an_only_drafter_are_named_beside_those_without_drafts(
    paper: Paper, questions: list[str]
) -> None:
    found = paper("v1-table1", *questions, *ONCE, "--drafter", "a")
    (measured,) = found["paper"]["measured"]
    names = [name for (name,) in columns(measured, "drafter or method")]
    assert all(names)
    assert sum(name.startswith("redrafter") for name in names) == 2


def test_a_speed_over_greedy_decoding_is_paired_with_the_published_one(
    paper: Paper, questions: list[str]
) -> None:
    """Of sampled rows; the published figure is that of the method and temperature."""
    found = paper("v1-table2", *questions, *ONCE, "--temperature", "0,0.5")
    (measured,) = found["paper"]["measured"]
    cells = columns(measured, "method", "accept", "T", "over greedy", "published")
    drafted = {row[1:3]: row[3:] for row in cells if row[0] == "redrafter"}
    assert drafted["rejection", "0.5"][1] == "3.02 ± 0.05, 0.99 ± 0.02"
    assert drafted["typical", "0.5"][1] == "3.02 ± 0.04, 0.98 ± 0.01"
    assert drafted["greedy", "0"][1] == ""
    assert next(row[3] for row in cells if row[:3] == ("mlx-lm", "", "0")) == "1.00x"
    assert all(cell.endswith("x") for cell, _ in drafted.values())


def test_accuracy_at_the_last_position_is_that_of_the_kept_weights(
    paper: Paper, questions: list[str], tmp_path: Path
) -> None:
    """It is read from the logs of the drafters' training; a drafter without a log has none."""
    folders = [trained_folder(tmp_path / name, "target", 0.001) for name in "abc"]
    for n, folder in enumerate(folders[:2]):
        events = [{"event": "evaluation", "step": step, "top1": [0.5, share], "best": best,
                   "seconds": 1.0} for step, share, best in ((1, 0.125 + n / 8, True),
                                                             (2, 0.0625, False))]  # fmt: skip
        Path(folder, "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    drafters = [word for folder in folders for word in ("--drafter", folder)]
    found = paper("v1-figure4", *questions, *ONCE, *drafters, "--beam-width", "2")
    (measured,) = found["paper"]["measured"]
    assert columns(measured, "accuracy") == [("12.5%",), ("25.0%",), ("",)]
    assert "accuracy over 2 drafters" in measured["note"]
    assert "last draft accepted over 3 drafters" in measured["note"]


def test_a_table_of_a_server_shows_the_published_figures_alone(cli: CommandLine) -> None:
    out = cli.out("bench", "--paper", "review-table2")
    assert "20.04" in out
    assert "bench serve" in out
    assert "--limit" in cli.error("bench", "--paper", "review-table2", "--limit", "1")


def test_a_drafter_knows_the_folder_that_it_was_loaded_from(tmp_path: Path) -> None:
    """Together with prompt lookup too; one that comes from no folder has none."""
    folder = trained_folder(tmp_path / "one, of 2; drafts with others", "data", 0.001)
    for name in (folder, f"{folder}+lookup"):
        loaded = tiny_redrafter(name).drafter
        assert loaded is not None
        assert loaded.folder == Path(folder)
    random = tiny_redrafter().drafter
    assert random is not None
    assert random.folder is None


@pytest.mark.parametrize(
    ("table", "keys", "column", "cell"),
    [
        ("table3", ("80",), "W 2", "20.45, 1636.00"),
        ("table3", ("80",), "W 8", "OOM"),
        ("table3", ("1",), "W 64", "110.64, 110.64"),
        ("speculators-table2", ("64", "1"), "k 8", "5.76, 5.76"),
    ],
)
def test_a_published_table_of_batches_has_a_column_for_each_width(
    table: str, keys: tuple[str, ...], column: str, cell: str
) -> None:
    """All figures of a cell are shown, equal ones too; what did not fit has one word."""
    shown = published_table(published(table))
    (row,) = (row for row in shown.rows if row[: len(keys)] == keys)
    assert row[shown.columns.index(column)] == cell
