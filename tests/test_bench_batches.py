"""`bench --batch-size`: which runs are made, timed and compared."""

from __future__ import annotations

import json
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from test_chat import Screen
from tiny import byte_model, byte_tokenizer, random_drafter

from redrafter_mlx.bench.analyse.batch_summary import summarise_batches
from redrafter_mlx.bench.measure.batches import BatchMeasurement, BatchPlan, BatchRun, BatchRunner
from redrafter_mlx.bench.measure.methods import Method, Run, Runner
from redrafter_mlx.bench.measure.plan import Prepared
from redrafter_mlx.bench.measure.questions import Question
from redrafter_mlx.cli import main, options
from redrafter_mlx.cli.bench import batches as bench_batches
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.tuning.tuner import Tuner

MLX_LM, PLAIN = Method("mlx-lm"), Method("autoregressive")
AUTO, DRAFTED = Method("redrafter", accept="greedy"), Method("redrafter", 0.0, "greedy", 2, 3)
QUESTIONS = [Prepared(Question(f"q{i}", id=i), [40 + i] * (3 + i)) for i in range(5)]
LINE = ["bench", "--categories", "writing,math", "--max-tokens", "5", "-r", "1", "--drafter", "x"]


def drafted(engine: EngineOptions | None = None) -> Redrafter:
    drafter = random_drafter(vocab_size=258)
    return Redrafter(byte_model(seed=1), byte_tokenizer(), drafter, engine=engine)


@pytest.mark.parametrize("size", [1, 3])
def test_every_method_answers_every_prompt_as_mlx_lm_answers_it_alone(size: int) -> None:
    model = drafted()
    runner = BatchRunner({None: model})
    prompts = [q.prompt_ids for q in QUESTIONS[:size]]
    alone = [model.generate(prompt, max_tokens=9, draft=False).token_ids for prompt in prompts]
    for method in (MLX_LM, PLAIN, AUTO, DRAFTED):
        run = runner.run(method, prompts, 9, 0)
        assert run.token_ids == alone
        assert len(run.tokens) == len(run.seconds) == size
        assert min(run.seconds) > 0
        if method != AUTO and method != DRAFTED:
            assert run.steps == [len(ids) - 1 for ids in alone]


class Ticking:
    """A clock that advances by one second with each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_the_clock_starts_when_every_prompt_has_its_first_token() -> None:
    """mlx-lm's batch emits a token of each row in turn, so timing starts at the second token."""
    prompts = [q.prompt_ids for q in QUESTIONS[:2]]
    run = BatchRunner({None: drafted()}, Ticking()).run(MLX_LM, prompts, 5, 0)
    lengths = [len(ids) for ids in run.token_ids]
    assert run.tokens == [n - 1 for n in lengths]
    assert run.first_seconds == 2.0
    assert lengths == [5, 5]
    assert run.seconds == [7.0, 8.0]


def test_a_batch_waits_for_the_step_that_mlx_lms_last_batch_left_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[object] = []
    monkeypatch.setattr(mx, "synchronize", lambda _: events.append(threading.current_thread().name))
    monkeypatch.setattr(mx, "reset_peak_memory", lambda: events.append("reset"))
    clock = Ticking()
    runner = BatchRunner({None: drafted()}, lambda: events.append("clock") or clock())
    events.clear()
    runner.run(PLAIN, [q.prompt_ids for q in QUESTIONS[:2]], 3, 0)
    assert events[:3] == ["engine", "reset", "clock"]


def test_every_size_goes_through_all_questions_and_methods_take_turns() -> None:
    plan = BatchPlan(QUESTIONS, [MLX_LM, PLAIN], [2, 5], 8, 2, 0)
    asked = [([q.question.id for q in group], method.name) for method, group in plan.order()]
    assert len(asked) == plan.size == 2 * 2 * (3 + 1)
    assert [ids for ids, _ in asked[:6:2]] == [[0, 1], [2, 3], [4, 0]]
    assert [name for _, name in asked[:4]] == [
        "mlx-lm", "autoregressive", "autoregressive", "mlx-lm",
    ]  # fmt: skip


def measured(method: Method, tokens: list[int], seconds: list[float]) -> BatchMeasurement:
    ids = [[0] * (n + 1) for n in tokens]
    steps = [n // (2 if method == DRAFTED else 1) for n in tokens]
    run = BatchRun(ids, tokens, seconds, steps, 0.5, 1.0)
    return BatchMeasurement(method, QUESTIONS[: len(tokens)], run)


def compared(runs: list[BatchMeasurement], *plain: int) -> list[BatchMeasurement]:
    """Compare with answers of mlx-lm's loop that have so many tokens."""
    return [run.compared({i: [0] * n for i, n in enumerate(plain)}) for run in runs]


def test_figures_are_those_of_the_runs() -> None:
    runs = [
        measured(DRAFTED, [10, 20], [2.0, 4.0]),
        measured(MLX_LM, [10, 20], [10.0, 10.0]),
        measured(PLAIN, [10, 20], [5.0, 5.0]),
    ]
    rows = summarise_batches(compared(runs, 11, 21))
    assert [row.method for row in rows] == [MLX_LM, PLAIN, DRAFTED]
    mlx_lm, _, ours = rows
    assert ours.total_tps is not None
    assert ours.request_tps is not None
    assert ours.speedup is not None
    assert ours.over_plain is not None
    assert ours.request_tps.median == 30 / 6
    assert ours.total_tps.median == 2 * 30 / 6
    assert ours.speedup.median == 20 / 6
    assert ours.over_plain.median == 10 / 6
    assert (ours.tokens_per_step, mlx_lm.tokens_per_step) == (2.0, 1.0)
    assert [row.matches_plain for row in rows] == [True] * 3
    rows = summarise_batches(compared(runs, 1, 21))
    assert [row.matches_plain for row in rows] == [False] * 3
    assert [row.matches_plain for row in summarise_batches(runs)] == [None] * 3


def test_a_speedup_pairs_the_same_questions_in_whatever_order_they_were_answered() -> None:
    """As after an interrupted run: here each question has exactly twice the speed."""
    fast = [replace(measured(PLAIN, [10], [s]), questions=QUESTIONS[i : i + 1])
            for i, s in enumerate((1.0, 5.0, 20.0))]  # fmt: skip
    slow = [replace(measured(MLX_LM, [10], [2 * m.run.seconds[0]]), questions=m.questions)
            for m in fast]  # fmt: skip
    _, row = summarise_batches([*fast, *reversed(slow)])
    assert row.speedup is not None
    assert (row.speedup.low, row.speedup.median, row.speedup.high) == (2.0, 2.0, 2.0)


def test_only_rounds_that_every_method_has_finished_are_complete() -> None:
    plan = BatchPlan(QUESTIONS[:2], [MLX_LM, PLAIN], [1], 8, 2, 0)
    done = [BatchMeasurement(method, group, measured(method, [1], [1.0]).run)
            for method, group in plan.order()]  # fmt: skip
    assert sorted(map(id, plan.complete(done))) == sorted(map(id, done))
    for number, complete in ((1, 0), (2, 2), (3, 2), (5, 4)):
        assert [*map(id, plan.complete(done[:number]))] == [*map(id, done[:complete])]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without measurements of the machine, for which no test waits."""
    monkeypatch.setattr(options, "load_model", lambda _, engine, **__: drafted(engine))
    monkeypatch.setattr(Tuner, "measured", True)


@pytest.mark.usefixtures("loaded")
def test_the_last_line_is_one_object_with_a_row_for_each_size_and_method(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shapes = ["--beam-width", "1..2", "--beam-length", "3"]
    assert main.run([*LINE, "--batch-size", "1,3", *shapes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = found["rows"]
    assert [(r["batch_size"], r["method"], r["beam_width"]) for r in rows] == [
        (size, *method)
        for size in (1, 3)
        for method in (("mlx-lm", None), ("autoregressive", None), ("redrafter", None),
                       ("redrafter", 1), ("redrafter", 2))
    ]  # fmt: skip
    assert all(r["matches_plain"] for r in rows)
    assert found["models"][0]["arithmetic"] == "float32"
    assert rows[0]["speedup"]["median"] == rows[1]["over_plain"]["median"] == 1.0
    assert {"prefixes", "max_nodes", "epsilon", "delta"} <= rows[0].keys()


@pytest.mark.usefixtures("loaded")
def test_all_requests_of_a_batch_are_decoded_at_once(tmp_path: Path) -> None:
    """More than the engine's usual eight: no request ends before another has its first token."""
    file = tmp_path / "batches.jsonl"
    line = ["bench", "--limit", "9", "--max-tokens", "30", "--ignore-eos", "-r", "1"]
    drafters = ["--drafter", "x", "--drafter", "random"]
    assert main.run([*line, *drafters, "--batch-size", "9", "--answers", str(file)]) == 0
    runs = [json.loads(text) for text in file.read_text().splitlines()]
    assert [run["batch"]["method"]["drafter"] for run in runs] == [None, None, "x", "random"]
    assert all(min(run["run"]["tokens"]) > 0 for run in runs)


@pytest.mark.usefixtures("loaded")
def test_a_terminal_shows_how_many_runs_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    monkeypatch.setenv("TERM", "xterm")
    assert main.run([*LINE, "--batch-size", "1"]) == 0
    assert re.search(r"[1-9] of \d+", screen.getvalue())


@pytest.mark.usefixtures("loaded")
def test_the_automatic_shape_is_measured_with_all_prefixes_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ways = ["--prefixes", "all,final", "--beam-width", "2", "--beam-length", "3"]
    assert main.run([*LINE, "--batch-size", "2", *ways, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(r["beam_width"], r["prefixes"]) for r in rows if r["method"] == "redrafter"] == [
        (None, "all"), (2, "all"), (2, "final"),
    ]  # fmt: skip


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("end", "status"), [(KeyboardInterrupt(), 130), (RedrafterError("no memory"), 1)]
)
def test_ctrl_c_or_an_error_prints_the_rounds_that_were_finished(
    end: BaseException,
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Impatient(BatchRunner):
        left = 3 + 5  # the untimed runs of three methods, and those that are timed

        def run(self, *given: object) -> BatchRun:
            Impatient.left -= 1
            if Impatient.left < 0:
                raise end
            return super().run(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(bench_batches, "BatchRunner", Impatient)
    file = tmp_path / "batches.jsonl"
    line = [*LINE, "--batch-size", "2", "--answers", str(file), "--json"]
    assert main.run(line) == status
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(file.read_text().splitlines()) == 5
    assert found["interrupted"] == (status == 130)
    assert (str(file) if status == 130 else "no memory") in found["notes"][0]
    assert [r["speedup"] is not None for r in found["rows"]] == [True] * 3
    Impatient.left = 0
    assert main.run(line[:-3]) == status  # no round was finished
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("loaded")
def test_results_of_batches_are_compared_size_by_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    assert main.run([*LINE, "--batch-size", "1,2", "--json"]) == 0
    file.write_text(capsys.readouterr().out)
    assert main.run(["bench", "--compare", str(file), str(file), "--json"]) == 0
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert {change["row"]["batch_size"] for change in changes} == {1, 2}
    assert all(change["ratio"]["median"] == 1 for change in changes)
    assert "total_tps" in {change["figure"] for change in changes}
    assert main.run(["bench", "--compare", str(file), str(file)]) == 0
    assert "batch of 2" in capsys.readouterr().out


@pytest.mark.usefixtures("loaded")
def test_the_table_has_the_figures_and_other_tokens_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = BatchRunner.run

    def wrong(self: BatchRunner, method: Method, *given: object) -> BatchRun:
        run = honest(self, method, *given)  # type: ignore[arg-type]
        if method == PLAIN:
            run.token_ids[0][-1] += 1
        return run

    monkeypatch.setattr(BatchRunner, "run", wrong)
    assert main.run([*LINE, "--batch-size", "2"]) == 1
    out = capsys.readouterr().out
    assert "total tok/s" in out
    assert "auto" in out
    assert "NO" in out
    assert "please report it" in out


@pytest.mark.usefixtures("loaded")
def test_an_interrupted_run_of_batches_resumes_where_its_answers_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stored runs are not repeated; another seed is refused."""
    file = tmp_path / "batches.jsonl"
    line = [*LINE, "-r", "2", "--batch-size", "1,2", "--answers", str(file)]
    assert main.run(line) == 0
    whole = file.read_text().splitlines()
    file.write_text("\n".join([*whole[:4], whole[4][:30]]))
    honest, run = BatchRunner.run, []

    def counted(
        self: BatchRunner, method: Method, prompts: list[list[int]], *more: int
    ) -> BatchRun:
        run.append((method, len(prompts)))
        return honest(self, method, prompts, *more)

    monkeypatch.setattr(BatchRunner, "run", counted)
    assert main.run(line) == 0
    resumed = file.read_text().splitlines()
    assert resumed[:4] == whole[:4]
    assert [json.loads(r)["batch"] for r in resumed] == [json.loads(w)["batch"] for w in whole]
    assert len(run) == len({*run}) + len(whole) - 4
    run.clear()

    def never(*_: object) -> Run:
        raise AssertionError("decoded again")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run", never)
        assert main.run(line) == 0
    assert run == []
    capsys.readouterr()
    assert main.run([*line, "--seed", "7"]) == 1
    assert "seed" in capsys.readouterr().err


@pytest.mark.usefixtures("loaded")
def test_sampled_batches_need_no_answers_of_mlx_lms_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> Run:
        raise AssertionError("decoded for nothing")

    monkeypatch.setattr(Runner, "run", never)
    assert main.run([*LINE, "--batch-size", "2", "--temperature", "1", "--limit", "2"]) == 0


@pytest.mark.usefixtures("loaded")
def test_sampled_methods_are_told_apart_and_owe_nobody_their_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ways = ["--temperature", "0.8", "--accept", "sample,rejection", "--limit", "2"]
    assert main.run([*LINE, "--batch-size", "2", *ways]) == 0
    out = capsys.readouterr().out
    assert "rejection" in out
    assert "0.8" in out
    assert "NO" not in out


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--batch-size", "0"), "--batch-size"),
        (("--batch-size", "9"), "--questions"),
        (("--batch-size", "257"), "256"),
        (("--batch-size", "2", "--prompt-tokens", "8,9"), "--prompt-tokens"),
        (("--batch-size", "2", "--draft-model", "b"), "--draft-model"),
        (("--batch-size", "2", "--plot", "a.png"), "--plot"),
        (("--batch-size", "2", "--dtype", "float32,float16"), "--dtype"),
        (("--batch-size", "two"), "--batch-size"),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_line(
    arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([*LINE, *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert named in err


def test_an_answers_file_that_cannot_be_read_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> Redrafter:
        raise AssertionError("loaded")

    monkeypatch.setattr(options, "load_model", never)
    assert main.run([*LINE, "--batch-size", "2", "--answers", "/none/a"]) == 1
    assert "/none" in capsys.readouterr().err
