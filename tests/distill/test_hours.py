"""Training for a given number of hours: it takes that long, however fast the machine is."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import CommandLine
from train_runs import arguments, model, options_file, own_cache, prompts, unwrapped  # noqa: F401
from waiting import wait_for

from redrafter_mlx.cli import main
from redrafter_mlx.distill import hours as hours_module
from redrafter_mlx.distill import run as stages
from redrafter_mlx.distill.evaluation.speed import MeasuredRow
from redrafter_mlx.distill.hours import HOURS, Deadline
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.options import WritingOptions
from redrafter_mlx.distill.options_file import read_options
from redrafter_mlx.distill.plan import RunPlan
from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.runtime.awake import kept_awake

JOB = TrainingJob("any", Path("out"))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def simulated(
    folder: Path, hours: float, of_token: float, of_step: float, evaluation: float
) -> tuple[float, float, int, list[float]]:
    """Run on a simulated machine: seconds, when training began, tokens, shares of the training."""
    clock = Clock()
    deadline = Deadline(folder, hours, clock)
    job, tokens, shares = deadline.of(JOB), 0, list[float]()
    clock.now += 15  # loading
    at_once = 2 * job.writing.batch * 100  # two processes finish a block, 100 tokens per text
    while not deadline.writing_is_over() or tokens < 3 * at_once:
        tokens += at_once
        clock.now += at_once * of_token
    deadline.begin_training(tokens)
    began, count = clock.now - 100, job.training.evaluations
    while (share := deadline.trained()) < 1:
        shares.append(share)
        clock.now += of_step
        if int(count * deadline.trained()) > int(count * share):
            clock.now += evaluation
    for _ in range(job.timed_questions):
        if not deadline.is_over():
            clock.now += 20.0
    return clock.now - 100, began, tokens, shares


@pytest.mark.parametrize("hours", [0.5, 1.0, 8.0])
@pytest.mark.parametrize("of_token", [0.001, 0.004, 0.02])
@pytest.mark.parametrize("of_step", [0.3, 1.2, 8.0])
def test_a_run_takes_its_hours_whatever_the_machine(
    tmp_path: Path, hours: float, of_token: float, of_step: float
) -> None:
    """50 tokens a second and 8 s a step are two cores that other programs keep busy."""
    took, began, tokens, shares = simulated(tmp_path, hours, of_token, of_step, 40.0)
    assert 0.85 * 3600 * hours < took < 1.02 * 3600 * hours + 60
    assert 0.35 * took < began < 0.6 * took
    assert tokens > 0
    assert shares == sorted(shares)
    assert shares[0] < 0.01, "the learning rate follows the time of training alone"


def test_twelve_minutes_are_enough_for_all_stages_on_a_slow_machine(tmp_path: Path) -> None:
    took, began, _, shares = simulated(tmp_path, 0.2, 0.02, 8.0, 40.0)
    assert took < 0.2 * 3600 * 1.1
    assert began < 0.6 * took
    assert len(shares) > 20


def test_blocks_are_smaller_in_a_short_run_but_those_of_given_answers_and_ranks() -> None:
    """Only whole blocks are kept, and every answer of a prompt is in its own block."""
    here, small = Path("nowhere"), replace(JOB, writing=WritingOptions(batch=20))
    rows = [Deadline(here, hours).of(JOB).writing.batch for hours in (0.01, 0.2, 1.0, 2.0, 9.0)]
    assert rows == [6, 13, 63, 126, 126]
    assert Deadline(here, 1.0).of(small).writing.batch == 20
    assert Deadline(here, 0.2).of(JOB, fixed=True).writing.batch == 126
    given = replace(JOB, data=Path("answers.jsonl"), labels="data")
    assert Deadline(here, 0.2).of(given).writing.batch == 126


def test_a_longer_run_is_evaluated_more_often() -> None:
    counts = [
        Deadline(Path("nowhere"), hours).of(JOB).training.evaluations
        for hours in (0.01, 0.5, 1.0, 2.0, 100.0)
    ]
    assert counts == [2, 2, 5, 10, 10]


def test_hours_that_the_smallest_corpus_takes_are_refused_with_those_that_are_enough(
    tmp_path: Path,
) -> None:
    clock = Clock()
    deadline = Deadline(tmp_path, 0.1, clock)
    clock.now += 300
    with pytest.raises(BadInputError, match=r"--hours is 0\.1") as caught:
        deadline.begin_training(5000)
    needed = float(str(caught.value).rsplit("give ", 1)[1].split()[0])
    clock.now = 100.0
    enough = Deadline(tmp_path, needed, clock)
    clock.now += 300
    assert not enough.writing_is_over()
    enough.begin_training(5000)


def test_a_resumed_run_keeps_its_clock_and_what_was_written(tmp_path: Path) -> None:
    clock = Clock()
    deadline = Deadline(tmp_path, 2.0, clock)
    clock.now += 1000
    deadline.save()
    clock.now += 50_000  # the night between
    again = Deadline(tmp_path, 2.0, clock)
    assert again.spent == 1000
    assert Deadline(tmp_path, 3.0, clock).spent == 0, "nothing is trained yet: it begins anew"
    clock.now += 2000
    again.begin_training(70_000)
    clock.now += 1000
    share = again.trained()
    assert share == pytest.approx(1000 / (again.training_ends - 3000))
    again.save()
    clock.now += 50_000
    third = Deadline(tmp_path, 2.0, clock)
    assert third.trained() == pytest.approx(share)
    assert third.of(JOB).answer_tokens == 70_000
    third.begin_training(80_000)
    assert third.of(JOB).answer_tokens == 70_000
    with pytest.raises(BadInputError, match="2 hours, not 3"):
        Deadline(tmp_path, 3.0, clock)


def test_a_killed_run_loses_a_minute_of_its_clock_at_most(tmp_path: Path) -> None:
    clock = Clock()
    deadline = Deadline(tmp_path, 2.0, clock)
    saved = []
    for _ in range(10):
        clock.now += 25
        deadline.save_now_and_then()
        saved.append(Deadline(tmp_path, 2.0, clock).spent)
    assert saved == [0, 0, 75, 75, 75, 150, 150, 150, 225, 225]


def test_train_hours_ends_with_a_drafter_and_resumes_as_the_same_run(
    model: Path, prompts: Path, tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is time for more passes, but the limit that is set here ends the run earlier."""
    monkeypatch.setattr(hours_module, "MAX_EPOCHS", 0.5)
    monkeypatch.setattr(Deadline, "writing_is_over", lambda _: True)  # the smallest corpus
    output = tmp_path / "drafter"
    asked = [*arguments(model, prompts, output, {"": {"answer_tokens": None}}), "--hours", "0.1"]
    shown = unwrapped(cli.run(*asked).err)
    assert "the run ends at" in shown
    record = json.loads((output / HOURS).read_text())
    options = read_options(output / "train.toml")
    assert options["answer_tokens"] == record["answer_tokens"]
    before = (output / "model.safetensors").read_bytes()
    assert main.run(asked) == 0
    assert (output / "model.safetensors").read_bytes() == before
    hurried, honest = [], stages.measure

    def measure(
        run: RunPlan,
        prompts: list[list[int]],
        done: Callable[[int], None],
        stop: Callable[[], bool],
    ) -> list[MeasuredRow]:
        hurried.append(stop())
        return honest(run, prompts, done, stop)

    monkeypatch.setattr(stages, "measure", measure)
    monkeypatch.setattr(Deadline, "spent", 3600.0)
    assert main.run(asked) == 0
    assert hurried == [False], "a finished run is timed with all its questions again"
    assert "not 5" in unwrapped(cli.error(*asked[:-1], "5"))


def test_time_ends_training_and_the_passes_made_are_those_of_the_options_file(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, steps = tmp_path / "drafter", []

    def trained(_: Deadline) -> float:
        steps.append(1)
        return min(1.0, len(steps) / 20)

    monkeypatch.setattr(Deadline, "trained", trained)
    monkeypatch.setattr(Deadline, "writing_is_over", lambda _: True)
    asked = [*arguments(model, prompts, output, {"": {"answer_tokens": None}}), "--hours", "0.1"]
    assert main.run(asked) == 0
    training = read_options(output / "train.toml")["training"]
    assert isinstance(training, dict)
    assert 0 < training["epochs"] < hours_module.MAX_EPOCHS
    rates = [
        row["learning_rate"]
        for row in map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        if "learning_rate" in row
    ]
    assert len(rates) > 5
    assert rates.index(max(rates)) <= 2
    assert min(rates[3:]) == rates[-1] < 0.3 * max(rates), "the rate has fallen when time ends"


def test_a_corpus_whose_last_block_is_empty_is_found_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hours_module, "MAX_EPOCHS", 0.5)
    monkeypatch.setattr(Deadline, "writing_is_over", lambda _: True)
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"Question {i}?", "answer": f"It is {i} times {i}. " * 4} for i in range(64)]
    rows.append({"prompt": "Question 64?", "answer": "It is too long. " * 999})
    data.write_text("\n".join(map(json.dumps, rows)))
    options = options_file(tmp_path / "options.toml", {"": {"answer_tokens": None}})
    asked = ["train", "--config", str(options), "--model", str(model), "--hours", "0.1"]
    asked += ["--data", str(data), "--labels", "data", "--output", str(tmp_path / "drafter")]
    assert main.run(asked) == 0
    assert main.run(asked) == 0


def test_a_run_without_hours_is_not_continued_as_one_with_them(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.safetensors").write_bytes(b"")
    with pytest.raises(BadInputError, match="without --hours"):
        Deadline(tmp_path, 1.0)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--hours", "0"], "--hours is 0"),
        (["--hours", "nan"], "--hours is nan"),
        (["--hours", "1e9"], "--hours is 1e+09"),
        (["--hours", "1", "--epochs", "2"], "--epochs"),
        (["--hours", "1", "--answer-tokens", "5000"], "--answer-tokens"),
    ],
)
def test_hours_out_of_range_or_beside_other_sizes_are_one_line(
    tmp_path: Path, cli: CommandLine, more: list[str], named: str
) -> None:
    assert named in cli.error("train", "-o", tmp_path / "out", *more)
    assert not (tmp_path / "out").exists()


def test_a_mac_on_mains_power_is_kept_awake_for_as_long_as_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, log = tmp_path / "caffeinate", tmp_path / "log"
    program.write_text(f'#!/bin/sh\necho "$@" > {log}.new && mv {log}.new {log}\nexec sleep 60\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    ended: list[Callable[[], int | None]] = []

    honest = subprocess.Popen

    def popen(*given: object, **named: object) -> object:
        process = honest(*given, **named)  # type: ignore[call-overload]
        ended.append(process.poll)
        return process

    monkeypatch.setattr("redrafter_mlx.runtime.awake.subprocess.Popen", popen)
    with kept_awake():
        assert ended[0]() is None
        wait_for(log.exists)
    assert ended[0]() is not None
    given = log.read_text().split()
    assert "-s" in given
    assert "-i" not in given, "it would hold on battery too"
    monkeypatch.setenv("PATH", "/nowhere")
    with kept_awake():
        assert len(ended) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("spent", None), ("spent", "12"), ("trained_from", float("nan")), ("answer_tokens", -1),
     ("hours", "8")],
)  # fmt: skip
def test_a_record_with_a_wrong_type_is_damage_that_names_the_file_and_the_key(
    tmp_path: Path, key: str, value: object
) -> None:
    Deadline(tmp_path, 8.0).begin_training(100_000)
    record = json.loads((tmp_path / HOURS).read_text())
    assert Deadline(tmp_path, 8.0).spent >= 0
    (tmp_path / HOURS).write_text(json.dumps({**record, key: value}))
    with pytest.raises(DamagedFileError, match=rf"hours.json cannot be used: {key} is"):
        Deadline(tmp_path, 8.0)
