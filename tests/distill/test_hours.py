"""Training for a given number of hours: it takes that long, and soon predicts when it ends."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from train_runs import arguments, model, options_file, own_cache, prompts, unwrapped  # noqa: F401
from waiting import wait_for

from redrafter_mlx.cli import main
from redrafter_mlx.distill.checked_arrays import digest_of
from redrafter_mlx.distill.estimate import Estimate, largest_trial
from redrafter_mlx.distill.evaluation.speed import MeasuredRow
from redrafter_mlx.distill.hours import HOURS, Schedule
from redrafter_mlx.distill.hours_plan import BlockSize, Pace, Plan, final_plan, first_plan
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.run import TrainingRun
from redrafter_mlx.distill.training.trainer import Evaluation, Step
from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.runtime.awake import kept_awake

TRIAL = Estimate(
    answer_tokens=1_000_000, parameters=1, drafter_bytes=1, corpus_bytes=4 * 10**9,
    training_bytes=1, max_bytes=40 * 10**9, memory_bytes=1, steps=5000, writing_seconds=4000.0,
    training_seconds=6000.0,
)  # fmt: skip
"""Estimate of a trial: 4 ms a token, 1.2 s a step, four passes of 1,250 steps per 1M tokens."""


def sealed(plan: dict[str, object]) -> str:
    """Return the file of a plan, with its checksum."""
    plan.pop("sha256", None)
    return json.dumps({**plan, "sha256": digest_of(plan)})


SLOW = replace(TRIAL, writing_seconds=20_000.0, training_seconds=40_000.0)
"""50 answer tokens a second, and 8 s a step: two cores that other programs keep busy."""

STEPS_A_TOKEN = 1250 / 1_000_000

BLOCKS = BlockSize(rows=126, least_rows=6, tokens=160, blocks=3, trained=2048, workers=2)

ANY = BlockSize(rows=126, least_rows=1, tokens=1, blocks=1)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Run:
    """A simulated run; `writing` and `training` multiply the times that the trial estimates."""

    def __init__(
        self,
        folder: Path,
        hours: float,
        writing: float,
        training: float,
        trial: float = 0.92,
        machine: Estimate = TRIAL,
    ) -> None:
        """trial: time of a step in a trial on the corpus, as a share of its true time."""
        self.clock, self.said = Clock(), list[tuple[float, float]]()
        self.schedule = Schedule(folder, hours, self.clock)
        self.clock.now += 15 + self.schedule.trial_seconds  # loading and the trial
        self.schedule.begin(machine, BLOCKS)
        self._write(writing * machine.writing_seconds / machine.answer_tokens)
        self.began_training = self.clock.now - 100
        self._train(training * machine.training_seconds / machine.steps, trial)
        self.seconds = self.clock.now - 100

    def _say(self, *at: int) -> None:
        self.said.append((self.clock.now - 100, self.schedule.to_go(*at)))

    def _write(self, of_token: float) -> None:
        plan, tokens = self.schedule.plan, 0
        assert plan is not None
        assert plan.rows is not None
        at_once = 2 * plan.rows * 100  # both processes finish a block, 100 tokens per text
        while tokens < plan.answer_tokens and not self.schedule.writing_is_over():
            tokens += at_once
            self.clock.now += at_once * of_token
            self._say()
        self.tokens = min(tokens, plan.answer_tokens)

    def _train(self, of_step: float, trial: float) -> None:
        evaluation = min(40.0, self.tokens / 1000)  # a share of the corpus is held out
        tried = of_step
        while tried < 4 * of_step and tried < self.schedule.trial_seconds + of_step:
            tried += of_step
        self.clock.now += tried + evaluation  # the trial, whose steps read no files
        pace = Pace(trial * of_step, evaluation, 20.0)
        plan = self.schedule.finalize(pace, self.tokens, self.tokens * STEPS_A_TOKEN)
        steps = round(plan.epochs * self.tokens * STEPS_A_TOKEN)
        due = {round(steps * n / plan.evaluations) for n in range(1, plan.evaluations + 1)}
        self.schedule.trained()
        for step in range(1, steps + 1):
            self.clock.now += of_step
            self.schedule.trained(Step(step, steps, 1.0, 1.0, 1.0))
            self._say(step, steps)
            if step in due:
                self.clock.now += evaluation
                self.schedule.trained(Evaluation(step, None, False))  # type: ignore[arg-type]
        self.clock.now += 20.0 * plan.timed_questions


@pytest.mark.parametrize("hours", [1.0, 8.0])
@pytest.mark.parametrize("writing", [0.6, 1.0, 1.6])
@pytest.mark.parametrize("training", [0.6, 1.0, 1.6])
def test_a_run_takes_its_hours_and_is_honest_after_ten_minutes(
    tmp_path: Path, hours: float, writing: float, training: float
) -> None:
    """Even if the trial's times were wrong."""
    run = Run(tmp_path, hours, writing, training)
    assert run.seconds == pytest.approx(3600 * hours, rel=0.15)
    for at, to_go in run.said:
        if at >= 600:
            assert at + to_go == pytest.approx(run.seconds, rel=0.25)
    longest = max(to_go for _, to_go in run.said)
    assert longest <= 3600 * hours


@pytest.mark.parametrize("hours", [0.17, 0.2, 0.5])
@pytest.mark.parametrize("writing", [0.6, 1.0, 1.6])
@pytest.mark.parametrize("training", [0.6, 1.0, 1.6])
def test_a_short_run_on_a_slow_machine_takes_its_time_too(
    tmp_path: Path, hours: float, writing: float, training: float
) -> None:
    """Ten minutes and more, at 50 answer tokens a second, even if the trial's times were wrong."""
    run = Run(tmp_path, hours, writing, training, machine=SLOW)
    assert run.seconds == pytest.approx(3600 * hours, rel=0.15)
    assert run.began_training < 0.6 * run.seconds
    for at, to_go in run.said:
        if at >= min(600, run.seconds / 2):
            assert at + to_go == pytest.approx(run.seconds, rel=0.25)


@pytest.mark.parametrize("started", [0.0, 4.0])
@pytest.mark.parametrize("of_one", [0.001, 0.1, 0.5, 5.0])
def test_a_trial_takes_its_share_of_the_time(
    of_one: float, started: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole batch is tried if time allows, else as many texts as fit; never fewer than 12."""
    clock, tried = Clock(), list[int]()
    monkeypatch.setattr("redrafter_mlx.distill.estimate.time.monotonic", clock)

    def trial(size: int) -> float:
        clock.now += started + of_one * size
        tried.append(size)
        return of_one

    assert largest_trial(trial, 12, 126, 18.0) == of_one
    assert tried[0] == 12
    fewest = started + of_one * 12
    assert clock.now - 100 <= max(18.0, fewest)
    if not started:
        assert tried[-1] == 126 or 18.0 - (clock.now - 100) < of_one or fewest > 9
    tried.clear()
    largest_trial(trial, 12, 126, math.inf)
    assert tried == [126]


def test_blocks_are_as_large_as_a_corpus_has_room_for_several_of() -> None:
    """Two processes write at least four blocks each; a long run has blocks of the full size."""
    rows = [BLOCKS.rows_for(tokens) for tokens in (1, 20_000, 100_000, 161_280, 10**7)]
    assert rows == [6, 15, 63, 126, 126]
    assert BLOCKS.least_tokens == 3 * 6 * 160
    assert replace(BLOCKS, tokens=10).least_tokens == 2048, "what training takes"
    fixed = replace(BLOCKS, least_rows=126)
    assert (fixed.rows_for(1), fixed.least_tokens) == (126, 3 * 126 * 160)


def test_the_corpus_ends_with_its_time(tmp_path: Path) -> None:
    """If writing is four times slower than in the trial, the corpus is four times smaller."""
    slow, usual = (Run(tmp_path / str(s), 8.0, s, 1.0) for s in (4.0, 1.0))
    assert slow.began_training == pytest.approx(usual.began_training, rel=0.02)
    assert slow.tokens == pytest.approx(usual.tokens / 4, rel=0.02)


def test_a_wrong_trial_of_training_is_found_out_in_ten_minutes(tmp_path: Path) -> None:
    run = Run(tmp_path, 8.0, 1.0, 1.0, trial=0.5)
    for at, to_go in run.said:
        if at >= run.began_training + 600:
            assert at + to_go == pytest.approx(run.seconds, rel=0.1)


def test_more_hours_bring_more_corpus_and_no_plan_is_beyond_the_disk() -> None:
    tokens = [first_plan(hours, TRIAL, ANY, 0.0).answer_tokens for hours in (1, 2, 8, 100)]
    assert tokens[1] == pytest.approx(2 * tokens[0], rel=0.01)
    assert tokens == sorted(tokens)
    assert tokens[-1] == 10_000_000, "what 40 GB hold"


def test_too_few_hours_are_refused_with_those_that_are_enough() -> None:
    with pytest.raises(BadInputError, match=r"--hours is 0\.005") as caught:
        first_plan(0.005, TRIAL, BLOCKS, 10.0)
    needed = float(str(caught.value).rsplit("give ", 1)[1].split()[0])
    assert first_plan(needed, TRIAL, BLOCKS, 10.0).answer_tokens >= BLOCKS.least_tokens


@pytest.mark.parametrize(("left", "evaluations", "epochs"), [(60.0, 2, 0.25), (1e6, 10, 12.0)])
def test_passes_stay_within_what_helps(left: float, evaluations: int, epochs: float) -> None:
    plan = first_plan(max(1.0, left / 3600), TRIAL, ANY, 0.0)
    spent = plan.seconds - left
    final = final_plan(
        replace(plan, spent=spent), Pace(1.0, 40.0 if left > 60 else 400.0, 20.0), 100_000, 125
    )
    assert (final.evaluations, final.epochs) == (evaluations, epochs)


def test_no_time_is_kept_for_questions_that_are_not_asked() -> None:
    plan, pace = first_plan(1.0, TRIAL, ANY, 0.0), Pace(1.0, 1.0, 60.0)
    timed, untimed = (final_plan(plan, pace, 100_000, 125, most) for most in (8, 0))
    assert timed.timing > untimed.timing == untimed.timed_questions == 0
    assert untimed.epochs >= timed.epochs


def test_a_resumed_run_keeps_its_plan_and_its_clock(tmp_path: Path) -> None:
    clock = Clock()
    schedule = Schedule(tmp_path, 2.0, clock)
    schedule.begin(TRIAL, ANY)
    clock.now += 1000
    schedule.save()
    clock.now += 50_000  # the night between
    again = Schedule(tmp_path, 2.0, clock)
    assert again.spent == 1000
    assert again.plan is not None
    assert again.plan.answer_tokens == schedule.plan.answer_tokens  # type: ignore[union-attr]
    other = Schedule(tmp_path, 3.0, clock)
    assert other.plan is None, "nothing is trained yet, so it is planned anew"
    again.finalize(Pace(1.0, 1.0, 1.0), 1000, 10)
    again.save()
    with pytest.raises(BadInputError, match="2 hours, not 3"):
        Schedule(tmp_path, 3.0, clock)


def test_a_killed_run_loses_a_minute_of_its_clock_at_most(tmp_path: Path) -> None:
    clock = Clock()
    schedule = Schedule(tmp_path, 2.0, clock)
    schedule.begin(TRIAL, ANY)
    saved = []
    for _ in range(10):
        clock.now += 25
        schedule.save_now_and_then()
        again = Schedule(tmp_path, 2.0, clock)
        saved.append(again.spent if again.plan is not None else 0.0)
    assert saved == [0, 0, 75, 75, 75, 150, 150, 150, 225, 225]


def test_a_resumed_run_has_the_blocks_of_its_plan(tmp_path: Path) -> None:
    """Blocks of a short run are smaller; a plan without a block size uses the job's."""
    job = TrainingJob("any", Path("out"))
    clock = Clock()
    schedule = Schedule(tmp_path, 0.2, clock)
    planned = schedule.begin(SLOW, BLOCKS).of(job)
    assert 6 <= planned.writing.batch < 126
    assert replace(planned.writing, batch=126) == job.writing
    schedule.save()
    again = Schedule(tmp_path, 0.2, clock)
    assert again.plan is not None
    assert again.plan.of(job) == planned
    kept = json.loads((tmp_path / HOURS).read_text())
    del kept["rows"]
    (tmp_path / HOURS).write_text(sealed(kept))
    older = Schedule(tmp_path, 0.2, clock)
    assert older.plan is not None
    assert older.plan.of(job).writing == job.writing


def test_a_plan_times_no_more_questions_than_the_job_asks_for() -> None:
    plan = final_plan(first_plan(8.0, TRIAL, ANY, 0.0), Pace(1.0, 1.0, 1.0), 5000, 10)
    assert plan.timed_questions > 1
    job = plan.of(TrainingJob("any", Path("out"), timed_questions=1))
    assert job.timed_questions == 1


def test_train_hours_ends_with_a_drafter_and_resumes_as_the_same_run(
    model: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is time for more passes, but the limits set here end the run earlier."""
    for name, value in (("MAX_EPOCHS", 0.5), ("EVALUATIONS", (1, 1)), ("QUESTIONS", (0, 0))):
        monkeypatch.setattr(f"redrafter_mlx.distill.hours_plan.{name}", value)
    output = tmp_path / "drafter"
    asked = [*arguments(model, prompts, output, {"": {"answer_tokens": None}}), "--hours", "0.03"]
    assert main.run(asked) == 0
    plan = json.loads((output / HOURS).read_text())
    assert plan["final"] is True
    options = (output / "train.toml").read_text()
    assert f"epochs = {plan['epochs']}" in options
    assert f"answer_tokens = {plan['answer_tokens']}" in options
    before = (output / "model.safetensors").read_bytes()
    assert main.run(asked) == 0
    assert (output / "model.safetensors").read_bytes() == before
    (output / HOURS).write_text(sealed({**plan, "spent": 3600.0}))
    hurried, honest = [], TrainingRun.measure

    def measure(
        run: TrainingRun,
        prompts: list[list[int]],
        done: Callable[[int], None],
        stop: Callable[[], bool],
    ) -> list[MeasuredRow]:
        hurried.append(stop())
        return honest(run, prompts, done, stop)

    monkeypatch.setattr(TrainingRun, "measure", measure)
    assert main.run(asked) == 0
    assert hurried == [False], "a finished run is timed with all its questions again"
    capsys.readouterr()
    assert main.run([*asked[:-1], "5"]) == 1
    assert "not 5" in unwrapped(capsys.readouterr().err)


def test_a_corpus_whose_last_block_is_empty_is_found_again(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("MAX_EPOCHS", 0.5), ("EVALUATIONS", (1, 1)), ("QUESTIONS", (0, 0))):
        monkeypatch.setattr(f"redrafter_mlx.distill.hours_plan.{name}", value)
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"Question {i}?", "answer": f"It is {i} times {i}. " * 4} for i in range(64)]
    rows.append({"prompt": "Question 64?", "answer": "It is too long. " * 999})
    data.write_text("\n".join(map(json.dumps, rows)))
    options = options_file(tmp_path / "options.toml", {"": {"answer_tokens": None}})
    asked = ["train", "--config", str(options), "--model", str(model), "--hours", "0.03"]
    asked += ["--data", str(data), "--labels", "data", "--output", str(tmp_path / "drafter")]
    assert main.run(asked) == 0
    assert main.run(asked) == 0


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
def test_hours_that_cannot_be_planned_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], named: str
) -> None:
    assert main.run(["train", "-o", str(tmp_path / "out"), *more]) == 1
    err = capsys.readouterr().err
    assert named in err
    assert err.count("\n") == 1
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
    [("spent", None), ("spent", "12"), ("writing", float("nan")), ("answer_tokens", None),
     ("hours", "8"), ("final", 1), ("rows", 0)],
)  # fmt: skip
def test_a_plan_with_a_wrong_type_is_damage_that_names_the_file_and_the_key(
    tmp_path: Path, key: str, value: object
) -> None:
    written = Schedule(tmp_path, 8.0)
    written.plan = Plan(8.0, 100_000, 900.0)
    written.save()
    plan = json.loads((tmp_path / "hours.json").read_text())
    assert Schedule(tmp_path, 8.0).plan is not None
    (tmp_path / "hours.json").write_text(json.dumps({**plan, key: value}))
    with pytest.raises(DamagedFileError, match=rf"hours.json cannot be used: {key} is"):
        Schedule(tmp_path, 8.0)
