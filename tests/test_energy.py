"""Joules per token, on machines that report their power, and a refusal elsewhere."""

from __future__ import annotations

import io
import itertools
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_samples import DRAFTED, PLAIN, answer
from test_bench_cli import QUICK, loader, refusal, result  # noqa: F401
from waiting import wait_for

from redrafter_mlx.bench.analyse.energy import energy_of
from redrafter_mlx.bench.measure import energy
from redrafter_mlx.bench.measure.energy import PowerMeter, power_meter
from redrafter_mlx.cli import main

pytestmark = pytest.mark.usefixtures("loader")

PROGRAM = """#!/bin/sh
echo started >> {log}
while true; do
  echo "*** Sampled system activity (now) (200.00ms elapsed) ***"
  echo "CPU Power: 1000 mW"
  echo "GPU Power: 3000 mW"
  echo "Combined Power (CPU + GPU + ANE): 4000 mW" || exit 0
  sleep 0.05
done
"""


@pytest.fixture
def powermetrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake program for a chip that always takes four watts, and a sudo that allows it."""
    log = tmp_path / "log"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 501)
    for name, text in (
        ("powermetrics", PROGRAM.format(log=log)),
        ("sudo", '#!/bin/sh\n[ "$1" = -n ] && shift\nexec "$@"\n'),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return log


def test_joules_a_token_are_power_times_seconds_by_tokens() -> None:
    plain = [answer(PLAIN, q, seconds=2.0, lengths=[1] * 4) for q in (1, 2)]
    drafted = [answer(DRAFTED, q, seconds=1.0, lengths=[2, 2]) for q in (1, 2)]
    found = energy_of([*plain, *drafted], lambda begin, end: 6.0 * (end - begin))
    assert [one.method for one in found] == [PLAIN, DRAFTED]
    assert [one.joules_per_token for one in found] == pytest.approx([3.0, 1.5])
    assert [one.watts for one in found] == pytest.approx([6.0, 6.0])
    assert [one.answers for one in found] == [2, 2]
    assert energy_of(plain, lambda *_: None) == ()


def test_samples_count_by_how_much_of_the_time_they_cover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(101)  # the moments at which the samples of a second each are read
    monkeypatch.setattr(energy, "time", SimpleNamespace(time=lambda: next(clock)))
    watts = [1, 4, 2]
    printed = [f"(1000ms elapsed)\nCombined Power (all): {1000 * w} mW\n" for w in watts]
    meter = PowerMeter(io.StringIO("".join(printed)))
    wait_for(lambda: len(meter.samples) == 3)
    assert meter.joules(100, 103) == pytest.approx(7)
    assert meter.joules(100.5, 102.25) == pytest.approx(0.5 * 1 + 4 + 0.25 * 2)
    assert meter.joules(100, 103.5) == pytest.approx(7 * 3.5 / 3), "the rest is like the whole"
    assert meter.joules(100, 104) is None
    assert meter.joules(99, 101) is None
    assert meter.joules(101, 101) is None


def test_the_last_moments_are_covered_and_then_it_ends(
    powermetrics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        assert seconds > 0.2, "a sample's time"
        wait_for(lambda: meter.samples[-1].end > end)

    monkeypatch.setattr(energy, "time", SimpleNamespace(time=time.time, sleep=sleep))
    with power_meter() as meter:
        end = time.time()
    assert meter.samples[-1].end > end
    assert powermetrics.exists()
    assert not meter._reader.is_alive()


def test_bench_tells_joules_where_it_is_asked(
    powermetrics: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "energy" not in result(capsys)
    assert not powermetrics.exists()
    long = [*QUICK, "--max-tokens", "60", "--energy"]
    assert main.run([*long, "--json"]) == 0
    energy = json.loads(capsys.readouterr().out.splitlines()[-1])["energy"]
    assert {one["method"]["name"] for one in energy} == {"mlx-lm", "autoregressive", "redrafter"}
    assert {round(one["watts"], 3) for one in energy} == {4.0}
    assert main.run(long) == 0
    assert "joules/token" in capsys.readouterr().out


@pytest.mark.parametrize("allowed", [True, False])
def test_a_machine_that_does_not_tell_is_one_line_before_anything_is_measured(
    tmp_path: Path,
    powermetrics: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    allowed: bool,
) -> None:
    del powermetrics
    if allowed:
        monkeypatch.setenv("PATH", "/nowhere")
    else:
        (tmp_path / "sudo").write_text("#!/bin/sh\nexit 1\n")
    err = refusal(capsys, "--energy")
    assert "powermetrics" in err
    assert ("sudo -v" in err) != allowed


def test_a_program_that_prints_nonsense_gives_no_samples(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("Combined Power: 5 mW\n(1ms elapsed)\nCombined Power (x): many mW\n")
    meter = PowerMeter(path.open())
    assert meter.first.wait(5)
    assert meter.samples == []
