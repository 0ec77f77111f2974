"""The advice of `tune`: from a machine's times and each drafter kind's usual acceptance."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from simulated import cliff, machine

from redrafter_mlx.bench.papers.published import CHIPS, timings
from redrafter_mlx.cli.tune.advice import (
    LOOKUP,
    NOTHING,
    TRAINED,
    Kind,
    expected_speed,
    published,
)
from redrafter_mlx.config import PLAIN
from redrafter_mlx.tuning.cost import CostModel

CHEAP = machine(cliff(8))
DEAR = machine(lambda rows: 20.0 * rows)


def mac(chip: str) -> tuple[CostModel, dict[int, float], dict[int, float]]:
    """Return a Mac with the times of the authors' runs with one beam; calls include drafting.

    Returns:
      the cost model; tokens/step and speedup by beam length
    """
    run = timings(chip, "float16")
    chains = {L: cell for (W, L), cell in run.drafted.items() if W == 1}
    plain = run.plain / run.tokens
    calls = {L: seconds / count for L, (count, seconds) in chains.items()}
    costs = replace(
        machine(lambda _: 1.0), short=((1, plain), *sorted(calls.items())), long=((1, plain),)
    )
    tokens = {L: run.tokens / count for L, (count, _) in chains.items()}
    return costs, tokens, {L: run.plain / seconds for L, (_, seconds) in chains.items()}


@pytest.mark.parametrize("chip", CHIPS)
def test_the_expected_speed_on_the_authors_macs_is_what_they_measured(chip: str) -> None:
    """With the acceptance of the authors' runs."""
    costs, tokens, speedups = mac(chip)
    for length, measured in speedups.items():
        chain = [tokens[n] - tokens.get(n - 1, 1.0) for n in range(2, length + 1)]
        chances = [chain[0], *(b / a for a, b in pairwise(chain))]
        found = expected_speed(Kind(tuple(chances), level_cost=0.0), costs, 128, (length,))
        assert found.tokens_per_step == pytest.approx(tokens[length])
        assert found.speedup == pytest.approx(measured, rel=0.02)
    trained = expected_speed(TRAINED, costs, 128, tuple(speedups))
    assert 1.0 < trained.speedup < 2.0
    assert trained.length <= 5


def test_usual_kinds_have_the_tokens_that_were_measured() -> None:
    four = {
        kind: expected_speed(kind, CHEAP, 128, (4,)).tokens_per_step for kind in (LOOKUP, TRAINED)
    }
    assert four[LOOKUP] == pytest.approx(1.38, abs=0.01)
    assert four[TRAINED] == pytest.approx(1.98, abs=0.01)


def test_where_rows_are_dear_plain_decoding_is_expected_to_be_fastest() -> None:
    for kind in (LOOKUP, TRAINED, published(1, 10)):
        cheap, dear = expected_speed(kind, CHEAP, 128), expected_speed(kind, DEAR, 128)
        assert cheap.speedup > 1
        assert (dear.length, dear.speedup) == (1, 1.0)
    assert expected_speed(NOTHING, CHEAP, 128).length == 1


def test_a_drafter_that_is_larger_beside_its_target_is_expected_to_be_slower() -> None:
    speeds = [expected_speed(published(size, 10), CHEAP, 128).speedup for size in (0, 1, 3, 30)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[-1] == 1.0


def test_tune_ends_in_the_ways_to_draft_and_their_commands(
    shell: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell("tune", "--json") == 0
    ways = {way["way"]: way for way in json.loads(capsys.readouterr().out)["ways"]}
    plain = ways["plain decoding"]
    assert plain["speedup"] == plain["tokens_per_step"] == 1.0
    assert plain["tokens_per_second"] == pytest.approx(1 / CHEAP.step(PLAIN, 256))
    for way in ways.values():
        assert way["tokens_per_second"] == pytest.approx(
            way["speedup"] * plain["tokens_per_second"]
        )
    assert "redrafter-mlx train " in ways["trained here"]["command"]
    assert ways["lookup"]["command"].endswith("--drafter lookup")
    assert shell("tune") == 0
    shown = capsys.readouterr().out
    assert all(way["command"] in shown for way in ways.values())


def test_the_commands_that_tune_proposes_load_the_model_as_it_was_tuned(
    shell: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell("tune", "--quantize", "4", "--dtype", "float32", "--json") == 0
    for way in json.loads(capsys.readouterr().out)["ways"]:
        assert "--dtype float32 --quantize 4" in way["command"]


def test_tune_on_plain_text_proposes_commands_for_plain_text(
    shell: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell("tune", "--raw", "--json") == 0
    for way in json.loads(capsys.readouterr().out)["ways"]:
        assert " --raw" in way["command"]
        assert " chat " not in way["command"]
