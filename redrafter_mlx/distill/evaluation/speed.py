"""A short measurement of drafted and plain decoding, question by question."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redrafter_mlx.config import BeamShape
from redrafter_mlx.engine.engine import Redrafter

TIMED_TOKENS = 96
"""Maximum number of tokens per timed answer."""

_MIN_TOKENS = 16  # minimum number of tokens of an answer whose speed is measured

SCATTER = 0.02
"""Noise of a short measurement: a speedup this close to 1 is treated as 1."""

_BEYOND = 1.15
"""A speedup above this multiple of tokens/step comes from the machine, not from the drafts. (It is
more than 1 because two query rows can take a little less time than one.)"""


@dataclass(frozen=True)
class MeasuredRow:
    """Measured speed of decoding with one beam shape and of plain decoding."""

    beam_width: int
    beam_length: int
    nodes: int  # maximum number of tokens in one call of the target
    tokens_per_step: float
    tokens_per_second: float
    baseline_tokens_per_second: float
    questions: int  # number of answers that were measured

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.baseline_tokens_per_second


def measure_speed(
    redrafter: Redrafter,
    prompts: Sequence[Sequence[int]],
    shapes: Sequence[BeamShape],
    done: Callable[[int], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[MeasuredRow]:
    """Answer each prompt greedily, with plain decoding and then with each shape, until `stop()`.

    The methods are interleaved, so that a machine that slows down slows all of them. A speedup is
    the median of the questions' ratios, a shape's tokens per second that times plain decoding's
    median. Answers of a few tokens are left out, as they say nothing about speed.
    """
    plain: list[float] = []
    drafted: dict[BeamShape, list[tuple[float, float]]] = {shape: [] for shape in shapes}
    for i, prompt in enumerate(prompts):
        alone = redrafter.generate(prompt, max_tokens=TIMED_TOKENS, draft=False)
        if len(alone.token_ids) >= _MIN_TOKENS:
            plain.append(alone.generation_tps)
            for shape, rows in drafted.items():
                width, length = shape.width, shape.length
                answer = redrafter.generate(
                    prompt, max_tokens=TIMED_TOKENS, beam_width=width, beam_length=length
                )
                rows.append((answer.generation_tps / alone.generation_tps, answer.tokens_per_step))
        done(i + 1)
        if stop():
            break
    if not plain:
        return []
    base, found = statistics.median(plain), []
    for shape, rows in drafted.items():
        speedup, per_step = map(statistics.median, zip(*rows, strict=True))
        size = shape.width, shape.length, shape.nodes
        found.append(MeasuredRow(*size, per_step, speedup * base, base, len(plain)))
    return found


def verdict(measured: Sequence[MeasuredRow]) -> str:
    """Return one sentence: whether drafting is faster on this machine, and with which beams."""
    if not measured:
        return "Its speed was not measured."
    best = max(measured, key=lambda row: row.speedup)
    figures = (
        f"{best.tokens_per_second:.1f} tokens a second with beam width {best.beam_width} and "
        f"length {best.beam_length}, {best.baseline_tokens_per_second:.1f} without"
    )
    if best.speedup > _BEYOND * best.tokens_per_step:
        return (
            f"On this machine it could not be timed: {best.speedup:.2f} times is more than "
            f"{best.tokens_per_step:.2f} tokens/step can bring, so other programs were in the way."
        )
    if best.speedup > 1 + SCATTER:
        return f"On this machine it is faster: {best.speedup:.2f} times ({figures})."
    if best.speedup < 1 - SCATTER:
        return f"On this machine it is not faster: {best.speedup:.2f} times at best ({figures})."
    return f"On this machine it makes no difference: {best.speedup:.2f} times at best ({figures})."
