"""`redrafter-mlx bench`: from a command line to the printed, saved and returned results."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_runs import QUICK, SHAPES, SOURCE, Loader, Refusal, Result, loader  # noqa: F401
from command_line import CommandLine
from tiny import byte_model, byte_tokenizer, random_drafter

from redrafter_mlx import bench
from redrafter_mlx.bench import models as bench_models
from redrafter_mlx.bench import session as bench_session
from redrafter_mlx.bench.measure.runner import Run, Runner
from redrafter_mlx.bench.models import draft_again, untrain
from redrafter_mlx.bench.options import BenchOptions, Loading, silent
from redrafter_mlx.bench.session import Hooks
from redrafter_mlx.cli import main, options
from redrafter_mlx.drafting.names import parse
from redrafter_mlx.drafting.recurrent import save_drafter
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.loading.drafter import prepare_drafter
from redrafter_mlx.loading.load import draft_with
from redrafter_mlx.loading.target import LoadedTarget


def test_the_last_line_is_one_object_with_every_field(result: Result) -> None:
    found = result(*SHAPES)
    rows = found["rows"]
    assert isinstance(rows, list)
    for row in rows:
        assert {"method", "beam_width", "beam_length", "nodes", "category", "accept",
                "temperature", "matches_baseline"} <= row.keys()  # fmt: skip
        for figure in ("tps", "speedup", "tokens_per_step"):
            assert row[figure].keys() == {"median", "low", "high"}
    whole = [r for r in rows if r["category"] == "all"]
    assert [(r["method"], r["beam_width"], r["beam_length"], r["nodes"]) for r in whole] == [
        ("mlx-lm", None, None, None), ("autoregressive", None, None, 1),
        ("redrafter", 1, 3, 3), ("redrafter", 2, 3, 5),
    ]  # fmt: skip
    assert all(r["matches_baseline"] for r in whole)
    assert whole[0]["speedup"]["median"] == 1.0
    assert {"chip", "os", "mlx", "mlx_lm", "blas"} <= found["machine"].keys()
    (model,) = found["models"]
    assert model["arithmetic"] == "float32"
    assert model["drafter_hash"]


def test_the_library_call_returns_what_the_command_prints(result: Result) -> None:
    """Times aside; and what the command refuses, it refuses."""
    options: dict[str, Any] = {"categories": "writing", "max_tokens": 6, "repeats": 1, "warmup": 0,
                               "beam_width": "1..2", "beam_length": "3"}  # fmt: skip
    drafter = random_drafter(seed=1, vocab_size=258)
    hooks = Hooks(lambda *_: Redrafter(byte_model(), byte_tokenizer(), drafter, source=SOURCE))
    found, printed = (bench.run(bench.BenchOptions(**options), hooks).to_dict(), result(*SHAPES))
    assert found.keys() == printed.keys()
    assert [as_json(found[name]) for name in ("machine", "models", "protocol")] == [
        printed[name] for name in ("machine", "models", "protocol")
    ]
    same = ("method", "beam_width", "category", "tokens_per_step", "nodes", "matches_baseline")
    for ours, theirs in zip(as_json(found["rows"]), printed["rows"], strict=True):  # type: ignore[call-overload]
        assert ours.keys() == theirs.keys()
        assert [ours[name] for name in same] == [theirs[name] for name in same]
    for impossible in ({"beam_width": "0"}, {"prompt_tokens": "8,9"}, {"drafter": ("none",)}):
        with pytest.raises(BadInputError):
            bench.run(bench.BenchOptions(**{**options, **impossible}), hooks)
    with pytest.raises(TypeError, match="beam_widht"):
        bench.BenchOptions(beam_widht="1")


def as_json(value: object) -> Any:
    return json.loads(json.dumps(value))


def test_without_shapes_the_automatic_one_is_measured(result: Result) -> None:
    rows = result()["rows"]
    drafted = [r for r in rows if r["method"] == "redrafter"]
    assert [r["beam_width"] for r in drafted] == [None]
    assert drafted[0]["matches_baseline"]


def test_a_shape_is_labelled_by_what_chooses_it(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured times, or with draws that belong to drafts the default, for which none are taken."""
    measured: list[object] = []
    monkeypatch.setattr(bench_session, "measure_machine", lambda m, _: measured.append(m) or [])
    for ways, labels, times in (
        (["--accept", "rejection", "--temperature", "1"], ["redrafter (default shape)"], 0),
        (["--accept", "sample", "--temperature", "1"], ["redrafter (automatic)"], 1),
        (["--beam-width", "2"], ["redrafter 2 x auto"], 1),
        (["--beam-length", "3"], ["redrafter auto x 3"], 1),
    ):
        out = cli.out(*QUICK, "--warmup", "1", *ways)
        assert all(label in out for label in labels)
        assert "None" not in out
        assert "shapes chosen" in out
        assert len(measured) == times
        measured.clear()


def test_without_warm_up_answers_are_those_of_a_machine_that_was_never_measured(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []
    monkeypatch.setattr(bench_session, "measure_machine", lambda m, _: measured.append(m) or [])
    assert "redrafter (automatic)" in cli.out(*QUICK, "--warmup", "0")
    assert not measured


def test_a_busy_machine_is_named_in_the_table_and_in_json(
    cli: CommandLine, result: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "process_time", lambda: 0.0)  # it got no time at all
    assert "busy: this process got 0% of a core" in cli.out(*QUICK)
    assert "got 0% of a core" in str(result()["notes"])


def test_a_run_resumes_with_the_same_draft_model_alone(
    tmp_path: Path, result: Result, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights, and not the same name alone."""
    hashes = iter(["sha256:1", "sha256:1", "sha256:2"])

    def load(*_: object, **__: object) -> LoadedTarget:
        source = replace(SOURCE, name="draft", fingerprint=next(hashes))
        return LoadedTarget.of(byte_model(), byte_tokenizer(), source)

    monkeypatch.setattr(bench_models, "load_target", load)
    line = ["--draft-model", "draft", "--limit", "1", "--answers", str(tmp_path / "a.jsonl")]
    rows = result(*line)["rows"]
    assert "mlx-lm speculative" in [r["method"] for r in rows]
    assert result(*line)["rows"] == rows
    assert "draft_model" in refusal(*line)


def test_the_papers_packing_verifies_and_counts_fewer_nodes(result: Result) -> None:
    """As in its Figure 6; with all prefixes of the search, a shape has a fixed node count."""
    wide = ["--beam-width", "4", "--beam-length", "4"]
    rows = []
    for prefixes in ("all", "final"):
        found = result(*wide, "--prefixes", prefixes)["rows"]
        rows += [r for r in found if r["method"] == "redrafter"]
    ours, papers = rows
    assert [r["prefixes"] for r in rows] == ["all", "final"]
    assert ours["nodes"] == ours["query_rows"] == papers["query_rows"] == 13
    assert 4 <= papers["nodes"] < 13
    assert papers["nodes_after"]["p1"] <= papers["nodes_after"]["median"] < 13
    assert papers["matches_baseline"]


def test_without_a_drafter_the_baselines_are_measured(result: Result) -> None:
    rows = result("--drafter", "none")["rows"]
    assert [r["method"] for r in rows] == ["mlx-lm", "autoregressive"]


def test_categories_without_a_drafter_make_no_empty_table(cli: CommandLine) -> None:
    more = ["--categories", "writing,math", "--limit", "2"]
    assert "By category" not in cli.out(*QUICK, *more, "--drafter", "none")
    assert "By category" in cli.out(*QUICK, *more)


def test_one_command_makes_the_table_of_methods_by_temperature(result: Result) -> None:
    found = result("--accept", "sample,rejection,typical", "--temperature", "0,0.7",
                   "--beam-width", "2", "--beam-length", "3")  # fmt: skip
    drafted = [r for r in found["rows"] if r["method"] == "redrafter"]
    assert [(r["accept"], r["temperature"]) for r in drafted] == [
        ("greedy", 0), ("rejection", 0.7), ("sample", 0.7), ("typical", 0.7)
    ]  # fmt: skip
    assert [r["matches_baseline"] for r in drafted] == [True, None, None, None]
    assert all(r["speedup"]["median"] > 0 for r in drafted)


def test_several_dtypes_are_loaded_in_turn(loader: Loader, result: Result) -> None:
    found = result("--dtype", "float32,4bit", *SHAPES)
    given = [(asked.dtype, asked.quantize) for asked in loader.asked]
    assert given == [("float32", None), ("auto", 4)]
    assert [r["dtype"] for r in found["rows"]] == ["float32"] * 4 + ["4bit"] * 4
    assert [m["dtype"] for m in found["models"]] == ["float32", "4bit"]


def test_quantize_loads_as_for_every_other_command(loader: Loader, result: Result) -> None:
    found = result("--quantize", "4", *SHAPES)
    assert [(asked.dtype, asked.quantize) for asked in loader.asked] == [("auto", 4)]
    assert [m["dtype"] for m in found["models"]] == ["4bit"]


def test_several_drafters_are_measured_in_one_run(
    tmp_path: Path, loader: Loader, cli: CommandLine, result: Result
) -> None:
    """All share the baseline runs; a random drafter costs as much as the trained one."""
    names = ["auto", "random", "lookup"]
    drafters = [word for name in names for word in ("--drafter", name)]
    file = tmp_path / "a.jsonl"
    found = result(*SHAPES, *drafters, "--answers", str(file))
    assert len(loader.asked) == 1
    rows = [r for r in found["rows"] if r["category"] == "all"]
    assert [r["drafter"] for r in rows] == [None, None, *(n for n in sorted(names) for _ in "12")]
    assert all(r["matches_baseline"] for r in rows)
    models = found["models"]
    assert [m["named"] for m in models] == names
    hashes = [m["drafter_hash"] for m in models]
    assert None not in hashes[:2]
    assert hashes[0] != hashes[1]
    assert hashes[2] is None
    again = result(*SHAPES, *drafters, "--answers", str(file))
    assert again["rows"] == found["rows"]
    table = cli.out(*QUICK, *SHAPES, *drafters)
    assert all(f"redrafter, {name}" in table for name in names)


@pytest.mark.parametrize(
    "runs",
    [[("a", 1), ("a+lookup", 1)], [("a+b", 1), ("a+b", 2)]],
    ids=["with prompt lookup added", "with one of two drafters trained anew"],
)
def test_a_run_does_not_go_on_with_other_drafts_than_it_began_with(
    runs: list[tuple[str, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    result: Result,
    refusal: Refusal,
) -> None:
    file = tmp_path / "a.jsonl"
    monkeypatch.chdir(tmp_path)
    save_drafter(random_drafter(seed=3, vocab_size=258), tmp_path / "b")
    for run, (drafter, seed) in enumerate(runs):
        save_drafter(random_drafter(seed=seed, vocab_size=258), tmp_path / "a")
        target = LoadedTarget.of(byte_model(), byte_tokenizer(), SOURCE)
        loaded = draft_with(prepare_drafter(parse(drafter)), target)
        monkeypatch.setattr(options, "load_model", lambda *_, loaded=loaded, **__: loaded)
        if run == 0:
            result(*SHAPES, "--answers", str(file))
    assert "drafts drafter " in refusal(*SHAPES, "--answers", str(file))


def test_a_random_drafter_needs_the_form_of_a_trained_one(
    monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    plain = Redrafter(byte_model(), byte_tokenizer(), host_drafters=(Lookup(),), source=SOURCE)
    monkeypatch.setattr(options, "load_model", lambda *_, **__: plain)
    assert "tiny" in refusal("--drafter", "random")


def test_several_files_of_questions_are_asked_one_after_the_other(
    tmp_path: Path, result: Result, refusal: Refusal
) -> None:
    for n in (1, 2):
        row = {"question_id": n, "category": "writing", "turns": [f"Say {n}."]}
        (tmp_path / f"{n}.jsonl").write_text(json.dumps(row))
    files = [word for n in (1, 2) for word in ("--questions", str(tmp_path / f"{n}.jsonl"))]
    assert result(*files)["protocol"]["asked"] == 2
    assert "occurs twice" in refusal(*files, *files)


def test_the_table_holds_figures_heatmap_and_acceptance(cli: CommandLine) -> None:
    table = cli.out(*QUICK, *SHAPES)
    for part in ("tok/s", "speedup", "★", "W 2", "nodes before", "mlx-lm", "BLAS: "):
        assert part in table


def test_a_finished_run_is_summarised_again_without_decoding(
    tmp_path: Path, result: Result, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "a.jsonl")
    first = result(*SHAPES, "--answers", file)
    assert len(Path(file).read_text().splitlines()) == 8

    def never(*_: object) -> Run:
        raise AssertionError("decoded again")

    monkeypatch.setattr(Runner, "run_together", never)
    assert result(*SHAPES, "--answers", file)["rows"] == first["rows"]
    assert not [note for note in first["notes"] if "busy" not in note]
    narrower = result("--beam-width", "1", "--beam-length", "3", "--answers", file)
    assert len(narrower["rows"]) == 3  # type: ignore[arg-type]
    assert "max_tokens" in refusal(*SHAPES, "--answers", file, "--max-tokens", "7")
    Path(file).write_text("mine\n")
    assert f"{file}, line 1" in refusal(*SHAPES, "--answers", file)


def test_methods_that_answered_in_different_runs_are_named(tmp_path: Path, result: Result) -> None:
    """The machine may have been another one, as far as its speed goes."""
    file = str(tmp_path / "a.jsonl")
    result("--beam-width", "1", "--beam-length", "3", "--answers", file)
    more = result(*SHAPES, "--answers", file)
    assert "to 2 questions, methods answered in different runs" in more["notes"][0]


def test_other_tokens_than_the_baselines_fail(
    tmp_path: Path, cli: CommandLine, result: Result
) -> None:
    file = tmp_path / "a.jsonl"
    result(*SHAPES, "--answers", str(file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    wrong = next(r for r in lines if r["method"]["beam_width"] == 2)
    wrong["token_ids"][2] += 1
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = result(*SHAPES, "--answers", str(file), status=1)
    marked = [r["beam_width"] for r in found["rows"] if r["matches_baseline"] is False]
    assert marked == [2]
    assert "1 row" in found["notes"][0]
    assert "NO, " in cli.run(*QUICK, *SHAPES, "--answers", file, status=1).out


def test_ctrl_c_prints_what_was_finished_and_the_run_resumes(
    tmp_path: Path,
    result: Result,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Impatient(Runner):
        left = 5

        def run_together(self, *given: Any) -> list[Run]:
            Impatient.left -= 1
            if Impatient.left < 0:
                raise KeyboardInterrupt
            return super().run_together(*given)

    file = str(tmp_path / "a.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(bench_session, "Runner", Impatient)
        found = result(*SHAPES, "--answers", file, status=130)
        assert found["interrupted"] is True
        assert file in found["notes"][0]
        runs = [r["runs"] for r in found["rows"]]
        assert runs == [1, 1, 1, 1], "of the fifth answer's question, the others are missing"
        Impatient.left = 0
        assert main.run([*QUICK, *SHAPES]) == 130  # no answer was finished
        assert capsys.readouterr().out == ""
    whole = result(*SHAPES, "--answers", file)
    assert sum(r["runs"] for r in whole["rows"] if r["category"] == "all") == 8


def test_an_error_in_a_later_dtype_leaves_the_figures_of_those_before(
    result: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loaded = bench_models.load_drafters, list[str]()

    def failing(options: BenchOptions, loading: Loading, *how: Any) -> dict[str | None, Redrafter]:
        loaded.append(loading.label)
        if len(loaded) > 1:
            raise BadInputError("the model is quantised to 4 bits")
        return load(options, loading, *how)

    monkeypatch.setattr(bench_session, "load_drafters", failing)
    found = result(*SHAPES, "--dtype", "float32,float16", status=1)
    assert {row["dtype"] for row in found["rows"]} == {"float32"}
    assert any("quantised to 4 bits" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--beam-width", "4..1"], "4..1"),
        (["--beam-width", "0"], "beam_width is 0"),
        (["--beam-length", "x"], "--beam-length"),
        (["--prefixes", "some"], "some"),
        (["--prefixes", "final"], "prefixes is 'final'"),
        (
            [
                "--prefixes",
                "final",
                "--beam-width",
                "2",
                "--accept",
                "rejection",
                "--temperature",
                "1",
            ],
            "rejection",
        ),
        (["--accept", "lucky"], "lucky"),
        (["--accept", "typical"], "--temperature above 0"),
        (["--temperature", "hot"], "--temperature"),
        (["--dtype", "float64"], "float64"),
        (["--dtype", "4bit,"], "--dtype"),
        (["--quantize", "5"], "quantize is 5"),
        (["--quantize", "4", "--dtype", "float16"], "--dtype 4bit"),
        (["--num-draft-tokens", "0", "--draft-model", "x"], "--num-draft-tokens holds 0"),
        (["--num-draft-tokens", "5"], "--draft-model"),
        (["--categories", "none"], "none"),
        (["--questions", "/none"], "/none"),
        (["--delay", "nan"], "--delay is nan"),
        (["--delay", "inf"], "--delay is inf"),
        (["--drafter", "none", "--drafter", "lookup"], "--drafter none"),
        (["--drafter", "lookup", "--drafter", "/no/folder"], "/no/folder"),
        (["--plot", "a.txt"], "a.txt"),
        (["--plot", "a.png", "--beam-width", "2"], "--beam-length"),
        (["-o", "json"], "--json"),
        (["-o", "table"], "--json"),
        (["--max-tokens", "1"], "--max-tokens is 1"),
        (["--drafter", "none", "--beam-width", "2"], "--drafter is none"),
        (["--answers", "/none/a"], "/none"),
    ],
)
def test_bad_options_are_refused_in_one_line_before_anything_is_loaded(
    arguments: list[str], named: str, loader: Loader, refusal: Refusal
) -> None:
    assert named in refusal(*arguments)
    assert loader.asked == []


def test_a_picture_is_drawn(tmp_path: Path, result: Result) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.png"
    result(*SHAPES, "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_further_drafters_have_the_memory_that_all_ranks_agreed_on() -> None:
    limits = EngineOptions(max_batch=3, memory_bytes=123_456_789)
    drafter = random_drafter(seed=1, vocab_size=258)
    first = Redrafter(byte_model(), byte_tokenizer(), drafter, source=SOURCE, engine=limits)
    untrained = untrain(first)
    assert untrained is not None
    for further in (untrained, draft_again(first, prepare_drafter(parse("lookup")), True, silent)):
        assert further.limits == limits


def test_help_names_what_it_measures_against(cli: CommandLine) -> None:
    assert "mlx-lm's own loop" in cli.out("bench", "--help")
