"""What auto-tuning has learned from answers is available to the next process."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
from simulated import SETUP, AnswerPolicy, Text, cliff, decode, machine, pace

from redrafter_mlx.autotune.acceptance import AcceptanceStatistics
from redrafter_mlx.autotune.candidates import candidates
from redrafter_mlx.autotune.learned import Learned, save_learned, saved_learned
from redrafter_mlx.autotune.step_times import StepTimes
from redrafter_mlx.config import PLAIN

COSTS = machine(cliff(8))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    return tmp_path


def learned(steps: int = 200) -> AcceptanceStatistics:
    policy = AnswerPolicy(COSTS)
    decode(policy, COSTS, [Text(0.9, 1)] * steps)
    policy.acceptance.copies.learn(2.0, 1, 1.5)
    return policy.acceptance


def test_a_process_begins_as_fast_as_another_ended() -> None:
    texts = [Text(0.9, seed) for seed in range(8)]
    first = AnswerPolicy(COSTS)
    ended = pace(decode(first, COSTS, texts * 40)[-200:])
    save_learned(SETUP, Learned({"greedy": first.acceptance}))
    known = saved_learned(SETUP).acceptance["greedy"].continued(candidates(COSTS))
    assert pace(decode(AnswerPolicy(COSTS, known), COSTS, texts)) > 0.97 * ended
    assert pace(decode(AnswerPolicy(COSTS), COSTS, texts)) < 0.97 * ended


def test_what_is_read_is_what_was_saved() -> None:
    known = learned()
    other = AcceptanceStatistics(candidates(COSTS))
    save_learned(SETUP, Learned({"greedy": known, "sample": other}))
    read = saved_learned(SETUP).acceptance
    assert set(read) == {"greedy", "sample"}
    assert read["greedy"].shapes == known.shapes
    assert read["greedy"].tokens().tolist() == known.tokens().tolist()
    assert read["greedy"].steps().tolist() == known.steps().tolist()
    assert read["greedy"].chances().tolist() == known.chances().tolist()
    assert (read["greedy"].copies.trust, read["greedy"].copies.cost) == (
        known.copies.trust,
        known.copies.cost,
    )


def test_what_steps_took_is_known_to_the_next_process_and_how_slow_it_is_now_is_not() -> None:
    times = StepTimes()
    for batch in (1, 2):
        for _ in range(9):
            times.learn(1, 1.0, 7.0, batch)
            times.learn(6, 1.0, 14.0, batch)
    save_learned(SETUP, Learned(times=times))
    read = saved_learned(SETUP).times
    for batch, rows in ((1, 1), (1, 6), (2, 1), (2, 6), (2, 9)):
        assert read.known(rows, batch) == times.known(rows, batch)
        assert read.correction(rows, batch) == times.correction(rows, batch)
    assert times.slowness() == pytest.approx(7.0)
    assert math.isnan(read.slowness())


def test_a_wrong_profile_misleads_one_process_and_not_the_next() -> None:
    """By the profile a second row is almost free; in truth it adds half of the call's cost."""
    believed = machine(lambda rows: 20.0 + 2.0 * rows)
    true = machine(lambda rows: 22.0 if rows == 1 else 30.0 + 2.0 * rows)
    paces = {}
    for keep in (True, False):
        first = AnswerPolicy(believed)
        decode(first, true, [Text(0.3, 1)] * 120)
        save_learned(SETUP, Learned({"greedy": first.acceptance}, first.batch.times))
        read = saved_learned(SETUP)
        acceptance = read.acceptance["greedy"].continued(candidates(believed))
        second = AnswerPolicy(believed, acceptance, read.times if keep else None)
        paces[keep] = pace(decode(second, true, [Text(0.3, 2)] * 40))
    assert paces[True] > 1.03 * paces[False]
    assert paces[True] > 0.98 / true.step(PLAIN, 128)


def test_another_setup_has_learned_nothing() -> None:
    save_learned(SETUP, Learned({"greedy": learned(20)}))
    assert saved_learned(replace(SETUP, drafter="another")).acceptance == {}


def test_the_file_does_not_grow_with_the_steps(cache: Path) -> None:
    sizes = []
    for steps in (50, 2000):
        save_learned(SETUP, Learned({"greedy": learned(steps)}))
        (path,) = (cache / "learned").iterdir()
        sizes.append(path.stat().st_size)
    assert max(sizes) < 8_000


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["by_depth"].pop(),
        lambda r: r["by_shape"][0].__setitem__(0, float("nan")),
        lambda r: r["by_shape"][0].__setitem__(0, -1.0),
        lambda r: r["by_shape"][0].__setitem__(0, "many"),
        lambda r: r["shapes"].append([0, 2, 2]),
        lambda r: r["shapes"].append([1, 2]),
        lambda r: r.pop("copies"),
        lambda r: r["copies"].__setitem__(0, 0.0),
        lambda r: r.update(shapes=3),
    ],
)
def test_a_damaged_file_counts_as_none(cache: Path, change: object) -> None:
    save_learned(SETUP, Learned({"greedy": learned(20)}))
    (path,) = (cache / "learned").iterdir()
    record = json.loads(path.read_text())
    assert callable(change)
    change(record["acceptance"]["greedy"])
    path.write_text(json.dumps(record))
    assert saved_learned(SETUP).acceptance == {}
    path.write_text("[" * 100_000)
    assert saved_learned(SETUP).acceptance == {}


@pytest.mark.parametrize("damage", [[[1, 2, 0.0]], [[1, 2, float("nan")]], [[1]], [["x", 2]], 5])
def test_damaged_times_count_as_none(cache: Path, damage: object) -> None:
    save_learned(SETUP, Learned({"greedy": learned(20)}))
    (path,) = (cache / "learned").iterdir()
    record = json.loads(path.read_text())
    record["times"]["by_rows"] = damage
    path.write_text(json.dumps(record))
    assert saved_learned(SETUP) == Learned({}, ANY)


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path) -> None:
    (cache / "learned").write_text("a file in the way")
    save_learned(SETUP, Learned({"greedy": learned(20)}))
    assert saved_learned(SETUP).acceptance == {}
