"""`bench --batch-size`: which runs are made, timed and compared."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from bench_samples import answer
from command_line import CommandLine
from screens import Screen
from tiny import byte_model, byte_tokenizer, random_drafter

from redrafter_mlx.bench import session as bench_session
from redrafter_mlx.bench.analyse.summary import of_whole_rounds, summarise
from redrafter_mlx.bench.measure.answers import Answer
from redrafter_mlx.bench.measure.methods import Method
from redrafter_mlx.bench.measure.plan import Plan, Prepared, measure
from redrafter_mlx.bench.measure.questions import Question
from redrafter_mlx.bench.measure.runner import Run, Runner
from redrafter_mlx.cli import main, options
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.tuning.tuner import Tuner

MLX_LM, PLAIN = Method("mlx-lm", batch_size=2), Method("autoregressive", batch_size=2)
DRAFTED = Method("redrafter", 0.0, "greedy", 2, 3, batch_size=2)
AUTO = replace(DRAFTED, beam_width=None, beam_length=None)
QUESTIONS = [Prepared(Question(f"q{i}", id=i), [40 + i] * (3 + i)) for i in range(5)]
LINE = ["bench", "--categories", "writing,math", "--max-tokens", "5", "-r", "1", "--drafter", "x"]


def drafted(engine: EngineOptions | None = None) -> Redrafter:
    drafter = random_drafter(vocab_size=258)
    return Redrafter(byte_model(seed=1), byte_tokenizer(), drafter, engine=engine)


def sized(*methods: Method, sizes: Sequence[int]) -> list[Method]:
    return [replace(method, batch_size=size) for size in sizes for method in methods]


def plan(methods: list[Method], questions: int = 5, **changes: object) -> Plan:
    made = Plan(QUESTIONS[:questions], methods, "float32", max_tokens=9, repeats=1, warmup=0,
                delay=0.0, seed=0)  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 3])
def test_every_method_answers_every_prompt_as_mlx_lm_answers_it_alone(size: int) -> None:
    model = drafted()
    runner, prompts = Runner({None: model}), [q.prompt_ids for q in QUESTIONS[:size]]
    alone = [model.generate(prompt, max_tokens=9, draft=False) for prompt in prompts]
    for method in sized(MLX_LM, PLAIN, AUTO, DRAFTED, sizes=[size]):
        runs = runner.run_together(method, prompts, 9, [0] * size)
        assert [run.token_ids for run in runs] == [answer.token_ids for answer in alone]
        assert [run.text for run in runs] == [answer.text for answer in alone]
        assert min(run.decode_seconds for run in runs) > 0
        if method.name != "redrafter":
            assert [run.accept_lengths for run in runs] == [
                [1] * (len(answer.token_ids) - 1) for answer in alone
            ]


def test_a_sampled_answer_in_a_batch_is_the_one_of_its_seed_alone() -> None:
    """Of our own methods; mlx-lm's batch has one random state for all of its requests."""
    runner, methods = Runner({None: drafted()}), []
    for size in (1, 2, 5):
        methods += [Method("autoregressive", 0.9, batch_size=size),
                    Method("redrafter", 0.9, "sample", 2, 3, batch_size=size)]  # fmt: skip
    answers = [*chain(*measure(plan(methods, seed=7), runner))]
    for found in answers:
        alone, seed = replace(found.method, batch_size=None), 7 + int(found.question_id)
        assert found.run.token_ids == runner.run(alone, found.prompt_ids, 9, seed).token_ids
    assert len({tuple(found.run.token_ids) for found in answers}) > 1


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
    runner = Runner({None: drafted()}, clock=Ticking())
    runs = runner.run_together(MLX_LM, prompts, 5, [0, 0])
    lengths = [len(run.token_ids) for run in runs]
    assert [run.timed_tokens for run in runs] == [n - 1 for n in lengths]
    assert [run.first_token_seconds for run in runs] == [2.0, 2.0]
    assert lengths == [5, 5]
    assert [run.decode_seconds for run in runs] == [7.0, 8.0]


def test_a_batch_waits_for_the_step_that_mlx_lms_last_batch_left_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[object] = []
    monkeypatch.setattr(mx, "synchronize", lambda _: events.append(threading.current_thread().name))
    monkeypatch.setattr(mx, "reset_peak_memory", lambda: events.append("reset"))
    clock = Ticking()
    runner = Runner({None: drafted()}, clock=lambda: events.append("clock") or clock())
    events.clear()
    runner.run_together(PLAIN, [q.prompt_ids for q in QUESTIONS[:2]], 3, [0, 0])
    assert events[:3] == ["engine", "reset", "clock"]


def test_every_size_goes_through_all_questions_and_methods_take_turns() -> None:
    made = plan(sized(MLX_LM, PLAIN, sizes=[2, 5]), repeats=2)
    asked = [(case.group, case.method.name) for case in made.order()]
    assert len(asked) == made.size == 2 * 2 * (3 + 1)
    assert [ids for ids, _ in asked[:6:2]] == [(0, 1), (2, 3), (4, 0)]
    assert [name for _, name in asked[:4]] == [
        "mlx-lm", "autoregressive", "autoregressive", "mlx-lm",
    ]  # fmt: skip


def measured(
    method: Method, tokens: list[int], seconds: list[float], first: int = 0, **changes: object
) -> list[Answer]:
    """Return one batch's answers to as many questions, from the first one on."""
    size, group = len(tokens), tuple(range(first, first + len(tokens)))
    step, method = 2 if method.name == "redrafter" else 1, replace(method, batch_size=size)
    made = [
        answer(method, question, lengths=[step] * (n // step), seconds=took)
        for question, n, took in zip(group, tokens, seconds, strict=True)
    ]
    return [replace(each, group=group, **changes) for each in made]  # type: ignore[arg-type]


def test_figures_are_those_of_the_runs() -> None:
    batches = [(DRAFTED, [2.0, 4.0]), (MLX_LM, [10.0, 10.0]), (PLAIN, [5.0, 5.0])]
    for same in (True, False, None):
        answers = [a for method, seconds in batches
                   for a in measured(method, [10, 20], seconds, as_alone=same)]  # fmt: skip
        rows = summarise(answers)
        assert [row.method for row in rows] == [MLX_LM, PLAIN, DRAFTED]
        assert [row.matches_baseline for row in rows] == [same] * 3
    mlx_lm, _, ours = (row.to_dict() for row in rows)
    medians = {name: ours[name]["median"] for name in ("request_tps", "total_tps", "speedup",
                                                       "over_plain")}  # type: ignore[index]  # fmt: skip
    assert medians == {"request_tps": 30 / 6, "total_tps": 2 * 30 / 6, "speedup": 20 / 6,
                       "over_plain": 10 / 6}  # fmt: skip
    assert (ours["tokens_per_step"], mlx_lm["tokens_per_step"]) == (2.0, 1.0)
    assert ours["first_seconds"] == 0.25


def test_a_speedup_pairs_the_same_questions_in_whatever_order_they_were_answered() -> None:
    """As after an interrupted run: here each question has exactly twice the speed."""
    times = [*enumerate((1.0, 5.0, 20.0))]
    fast = [measured(PLAIN, [10], [s], i) for i, s in times]
    slow = [measured(MLX_LM, [10], [2 * s], i) for i, s in times]
    _, row = summarise([*chain(*fast, *reversed(slow))])
    assert row.speedup is not None
    assert (row.speedup.low, row.speedup.median, row.speedup.high) == (2.0, 2.0, 2.0)


def test_only_rounds_that_every_method_has_finished_are_complete() -> None:
    methods = sized(MLX_LM, PLAIN, sizes=[1])
    done = [replace(answer(case.method, int(case.group[0]), case.repeat), group=case.group)
            for case in plan(methods, 2, repeats=2).order()]  # fmt: skip
    planned = {"float32": [*methods, MLX_LM]}
    assert of_whole_rounds(done, planned) == done
    for number, complete in ((1, 0), (2, 2), (3, 2), (5, 4)):
        assert of_whole_rounds(done[:number], planned) == done[:complete]


def test_a_batch_that_a_killed_run_wrote_in_part_is_missing() -> None:
    made = plan([MLX_LM, PLAIN], 4)
    answers = [*chain(*measure(made, Runner({None: drafted()})))]
    assert len(answers) == 4 * 2
    done, missing = made.split(answers[:-1])
    assert done == answers[:-2]
    assert [case.group for case in missing] == [answers[-1].group]
    assert made.split([*answers[:-1], *answers[-2:]]) == (answers, [])


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without measurements of the machine, for which no test waits."""
    monkeypatch.setattr(options, "load_model", lambda _, engine, **__: drafted(engine))
    monkeypatch.setattr(Tuner, "measured", True)


@pytest.mark.usefixtures("loaded")
def test_the_last_line_is_one_object_with_a_row_for_each_size_and_method(cli: CommandLine) -> None:
    shapes = ["--beam-width", "1..2", "--beam-length", "3"]
    found = cli.json(*LINE, "--batch-size", "1,3", *shapes, "--json")
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
    answers = [json.loads(text) for text in file.read_text().splitlines()]
    assert [a["method"]["drafter"] for a in answers[::9]] == [None, None, "x", "random"]
    assert all(a["timed_tokens"] > 0 for a in answers)


@pytest.mark.usefixtures("loaded")
def test_a_terminal_shows_how_many_runs_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    monkeypatch.setenv("TERM", "xterm")
    assert main.run([*LINE, "--batch-size", "1"]) == 0
    assert re.search(r"[1-9] of \d+", screen.getvalue())


@pytest.mark.usefixtures("loaded")
def test_the_automatic_shape_is_measured_with_all_prefixes_alone(cli: CommandLine) -> None:
    ways = ["--prefixes", "all,final", "--beam-width", "2", "--beam-length", "3"]
    rows = cli.json(*LINE, "--batch-size", "2", *ways, "--json")["rows"]
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
    class Impatient(Runner):
        left = 3 + 5  # the untimed runs of three methods, and those that are timed

        def run_together(self, method: Method, *given: Any) -> list[Run]:
            Impatient.left -= method.batch_size is not None
            if Impatient.left < 0:
                raise end
            return super().run_together(method, *given)

    monkeypatch.setattr(bench_session, "Runner", Impatient)
    file = tmp_path / "batches.jsonl"
    line = [*LINE, "--batch-size", "2", "--answers", str(file), "--json"]
    assert main.run(line) == status
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(file.read_text().splitlines()) == 2 * 5
    assert found["interrupted"] == (status == 130)
    assert (str(file) if status == 130 else "no memory") in found["notes"][0]
    assert [r["speedup"] is not None for r in found["rows"]] == [True] * 3
    Impatient.left = 0
    assert main.run(line[:-3]) == status  # no answer was finished
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("loaded")
def test_results_of_batches_are_compared_size_by_size(tmp_path: Path, cli: CommandLine) -> None:
    file = tmp_path / "a.json"
    file.write_text(cli.out(*LINE, "--batch-size", "1,2", "--json"))
    changes = cli.json("bench", "--compare", file, file, "--json")["changes"]
    assert {change["row"]["batch_size"] for change in changes} == {1, 2}
    assert all(change["ratio"]["median"] == 1 for change in changes)
    assert "total_tps" in {change["figure"] for change in changes}
    assert "batch of 2" in cli.out("bench", "--compare", file, file)


@pytest.mark.usefixtures("loaded")
def test_the_table_has_the_figures_and_other_tokens_fail(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Runner.run_together

    def wrong(self: Runner, method: Method, *given: Any) -> list[Run]:
        runs = honest(self, method, *given)
        if method == PLAIN:
            runs[0].token_ids[-1] += 1
        return runs

    monkeypatch.setattr(Runner, "run_together", wrong)
    out = cli.run(*LINE, "--batch-size", "2", status=1).out
    assert "total tok/s" in out
    assert "auto" in out
    assert "NO" in out
    assert "please report it" in out


@pytest.mark.usefixtures("loaded")
def test_an_interrupted_run_of_batches_resumes_where_its_answers_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    """Stored runs are not repeated; another seed is refused."""
    file = tmp_path / "batches.jsonl"
    line = [*LINE, "-r", "2", "--batch-size", "1,2", "--answers", str(file)]
    assert main.run(line) == 0
    whole = file.read_text().splitlines()
    file.write_text("\n".join([*whole[:4], whole[4][:30]]))
    honest, run = Runner.run_together, []

    def counted(self: Runner, method: Method, prompts: list[list[int]], *more: Any) -> list[Run]:
        run.append(method)
        return honest(self, method, prompts, *more)

    monkeypatch.setattr(Runner, "run_together", counted)
    assert main.run(line) == 0
    resumed = file.read_text().splitlines()
    assert resumed[:4] == whole[:4]
    same = ("method", "group", "question_id", "repeat", "token_ids")
    assert [[json.loads(r)[k] for k in same] for r in resumed] == [
        [json.loads(w)[k] for k in same] for w in whole
    ]
    timed = [method for method in run if method.batch_size is not None]
    runs = sum(1 / json.loads(w)["method"]["batch_size"] for w in whole)
    assert len(timed) == len({*timed}) + runs - 4, "the first four are of batches of one"
    run.clear()
    assert main.run(line) == 0
    assert run == []
    assert "seed" in cli.error(*line, "--seed", "7")


@pytest.mark.usefixtures("loaded")
def test_sampled_batches_need_no_answers_of_mlx_lms_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Runner.run_together

    def only_batches(self: Runner, method: Method, *given: Any) -> list[Run]:
        assert method.batch_size is not None
        return honest(self, method, *given)

    monkeypatch.setattr(Runner, "run_together", only_batches)
    assert main.run([*LINE, "--batch-size", "2", "--temperature", "1", "--limit", "2"]) == 0


@pytest.mark.usefixtures("loaded")
def test_sampled_methods_are_told_apart_and_owe_nobody_their_tokens(cli: CommandLine) -> None:
    ways = ["--temperature", "0.8", "--accept", "sample,rejection", "--limit", "2"]
    out = cli.out(*LINE, "--batch-size", "2", *ways)
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
    arguments: tuple[str, ...], named: str, cli: CommandLine
) -> None:
    assert named in cli.error(*LINE, *arguments)


def test_an_answers_file_that_cannot_be_read_is_refused_before_anything_is_loaded(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> Redrafter:
        raise AssertionError("loaded")

    monkeypatch.setattr(options, "load_model", never)
    assert "/none" in cli.error(*LINE, "--batch-size", "2", "--answers", "/none/a")
