"""What auto-tuning has learned from answers is available to the next process."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from simulated import SETUP, AnswerPolicy, Text, cliff, decode, machine, pace
from tiny import random_drafter, random_model

from redrafter_mlx.config import AcceptMethod
from redrafter_mlx.target_model.fingerprint import values_hash
from redrafter_mlx.tuning.acceptance import AcceptanceStatistics
from redrafter_mlx.tuning.corrections import Corrections
from redrafter_mlx.tuning.cost import candidates
from redrafter_mlx.tuning.store import Record, save_record, saved_record

COSTS = machine(cliff(8))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    return tmp_path


def learned(steps: int = 200) -> AcceptanceStatistics:
    policy = AnswerPolicy(COSTS)
    decode(policy, COSTS, [Text(0.9, 1)] * steps)
    policy.acceptance.trust.learn("short match", 0.9, 0.5)
    return policy.acceptance


def save(
    acceptance: dict[AcceptMethod, AcceptanceStatistics],
    corrections: Corrections | None = None,
    values: str = "0",
) -> None:
    """Save what one process has learned, on a machine that was measured."""
    save_record(SETUP, Record(COSTS), values, measured=True)
    save_record(SETUP, Record(COSTS, corrections or Corrections(), acceptance), values)


def saved(values: str = "0") -> dict[AcceptMethod, AcceptanceStatistics]:
    return saved_record(SETUP, values).acceptance


def corrected() -> Corrections:
    """Return the corrections of a machine on which two rows cost twice what the profile says."""
    times = Corrections()
    for _ in range(20):
        times.of(2).learn(1, 1.0, 1.0)
        times.of(2).learn(2, 1.0, 2.0)
    return times


def test_a_process_corrects_the_profile_as_another_did() -> None:
    save({}, corrected())
    times = saved_record(SETUP, "0").corrections
    assert times.to_record() == corrected().to_record()
    assert [times.of(2).correction(rows) for rows in (1, 2)] == [1.0, 2.0]
    assert 2 in times.of(2).factors
    assert 2 not in times.of(1).factors


def test_corrections_of_other_measurements_are_not_used() -> None:
    """A process that started before `tune` does not undo it."""
    mine = Record(None, corrected(), {"greedy": learned(20)})
    save_record(SETUP, mine, "0")
    assert 2 in saved_record(SETUP, "0").corrections.of(2).factors
    save_record(SETUP, Record(COSTS), "0", measured=True)
    save_record(SETUP, mine, "0")
    known = saved_record(SETUP, "0")
    assert known.costs == COSTS
    assert known.corrections.to_record() == Corrections().to_record()
    assert set(known.acceptance) == {"greedy"}


def test_a_process_begins_as_fast_as_another_ended() -> None:
    texts = [Text(0.9, seed) for seed in range(8)]
    times = Corrections()
    first = AnswerPolicy(COSTS, None, times)
    ended = pace(decode(first, COSTS, texts * 40)[-200:])
    save({"greedy": first.acceptance}, times)
    record = saved_record(SETUP, "0")
    known = record.acceptance["greedy"].continued(candidates(COSTS))
    again = AnswerPolicy(COSTS, known, record.corrections)
    assert pace(decode(again, COSTS, texts)) > 0.97 * ended
    assert pace(decode(AnswerPolicy(COSTS), COSTS, texts)) < 0.97 * ended


def test_what_is_read_is_what_was_saved() -> None:
    known = learned()
    save({"greedy": known, "sample": AcceptanceStatistics(candidates(COSTS))})
    read = saved()
    assert set(read) == {"greedy", "sample"}
    again = read["greedy"].continued(known.shapes)
    assert again.tokens().tolist() == known.tokens().tolist()
    assert read["greedy"].chances().tolist() == known.chances().tolist()
    assert read["greedy"].to_record() == known.to_record()
    assert read["greedy"].trust.of("short match") == known.trust.of("short match") < 1


def test_another_setup_has_learned_nothing() -> None:
    save({"greedy": learned(20)})
    assert saved_record(replace(SETUP, drafter="another"), "0").acceptance == {}


def test_a_drafter_that_was_trained_anew_begins_without_the_older_ones_rates() -> None:
    model, one, other = random_model(), random_drafter(), random_drafter(seed=5)
    assert values_hash(model, one) == values_hash(random_model(), random_drafter())
    assert len({values_hash(model), values_hash(model, one), values_hash(model, other)}) == 3
    save({"greedy": learned(20)}, values=values_hash(model, one))
    assert saved(values_hash(model, other)) == {}
    assert saved_record(SETUP, values_hash(model, other)).costs == COSTS


def test_the_file_does_not_grow_with_the_steps(cache: Path) -> None:
    sizes = []
    for steps in (50, 2000):
        save({"greedy": learned(steps)})
        (path,) = (cache / "tuning").iterdir()
        sizes.append(path.stat().st_size)
    assert max(sizes) < 8_000


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["counts"].pop(),
        lambda r: r["counts"][0][1].__setitem__(0, float("nan")),
        lambda r: r["counts"][0][1].__setitem__(0, -1.0),
        lambda r: r["counts"][0][1].__setitem__(0, "many"),
        lambda r: r["counts"][1][0].__setitem__(0, 0.0),
        lambda r: r["counts"][0][0].__setitem__(0, 1e300),
        lambda r: r["counts"][0].append([0.0]),
        lambda r: r["counts"][0][0].append(0.0),
        lambda r: r.pop("trust"),
        lambda r: r["trust"].update({"short match": [0.0, 1.0]}),
        lambda r: r["trust"].update({"long match": [math.nan, 1.0]}),
        lambda r: r.update(counts=3),
    ],
)
def test_a_damaged_file_counts_as_none(cache: Path, change: object) -> None:
    save({"greedy": learned(20)})
    (path,) = (cache / "tuning").iterdir()
    record = json.loads(path.read_text())
    assert callable(change)
    change(record["acceptance"]["greedy"])
    path.write_text(json.dumps(record))
    assert saved() == {}
    path.write_text("[" * 100_000)
    assert saved() == {}


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.inf, math.nan, "1", None])
def test_corrections_that_cannot_have_been_measured_count_as_none(
    cache: Path, ratio: object
) -> None:
    save({}, corrected())
    (path,) = (cache / "tuning").iterdir()
    record = json.loads(path.read_text())
    record["corrections"]["1"][1][0][1][0] = ratio
    path.write_text(json.dumps(record))
    read = saved_record(SETUP, "0").corrections
    assert read.to_record() == Corrections().to_record()


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path) -> None:
    (cache / "tuning").write_text("a file in the way")
    save({"greedy": learned(20)})
    assert saved() == {}
