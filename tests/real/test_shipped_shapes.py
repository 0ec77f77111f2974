"""The shipped drafter at fixed shapes: tokens per step, without a clock."""

from __future__ import annotations

import pytest
from places import ROOT

from redrafter_mlx.bench.measure.questions import OWN_QUESTIONS, read_questions
from redrafter_mlx.drafting.names import parse
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.loading.drafter import prepare_drafter
from redrafter_mlx.loading.load import draft_with
from redrafter_mlx.loading.target import LoadedTarget

pytestmark = pytest.mark.real_model

N = 24
QUOTING = read_questions(ROOT / "bench" / "quoting.jsonl")
QUESTIONS = [OWN_QUESTIONS[0].text, OWN_QUESTIONS[8].text, QUOTING[3].text]


@pytest.fixture(scope="module")
def drafters(smollm2_float32: LoadedTarget) -> dict[str, Redrafter]:
    words = ("trained", "auto")
    return {word: draft_with(prepare_drafter(parse(word)), smollm2_float32) for word in words}


def tokens_per_step(redrafter: Redrafter, width: int, length: int) -> float:
    """Return the mean over all questions; every step verifies the whole shape."""
    tokens = steps = 0
    for question in QUESTIONS:
        responses = list(
            redrafter.stream(question, max_tokens=N, beam_width=width, beam_length=length)
        )
        nodes = {r.steps: r.step.nodes for r in responses if r.steps > 0}
        assert {*nodes.values()} == {width * (length - 1) + 1}
        tokens += len(responses) - 1
        steps += responses[-1].steps
    return tokens / steps


@pytest.fixture(scope="module")
def alone(drafters: dict[str, Redrafter]) -> dict[tuple[int, int], float]:
    """Tokens per step of the drafter alone, by width and length."""
    return {
        shape: tokens_per_step(drafters["trained"], *shape) for shape in ((1, 2), (1, 4), (3, 4))
    }


def test_wider_and_longer_beams_make_more_tokens_a_step(
    alone: dict[tuple[int, int], float],
) -> None:
    assert 1.4 < alone[1, 2] < alone[1, 4] < alone[3, 4]


@pytest.mark.parametrize("shape", [(1, 4), (3, 4)], ids=["1x4", "3x4"])
def test_lookup_takes_no_tokens_away_from_the_drafter(
    shape: tuple[int, int], drafters: dict[str, Redrafter], alone: dict[tuple[int, int], float]
) -> None:
    assert tokens_per_step(drafters["auto"], *shape) > 0.99 * alone[shape]
