"""A short measurement: drafted decoding beside plain decoding, question by question."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redrafter_mlx.config import BeamShape
from redrafter_mlx.engine.engine import Redrafter

TIMED_TOKENS = 96
"""Of each answer."""

SCATTER = 0.02
"""Speedups this close to 1 are not told apart from 1: a short measurement scatters as much."""


_BEYOND = 1.15
"""Times its tokens/step, a speedup is the machine's and not the drafts'. (Two query rows can take
a little less time than one.)"""


@dataclass(frozen=True)
class MeasuredRow:
    """Real decoding with one beam shape, timed beside auto-regression.

    nodes: the most tokens in one call of the target
    """

    beam_width: int
    beam_length: int
    nodes: int
    tokens_per_step: float
    tokens_per_second: float
    baseline_tokens_per_second: float

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.baseline_tokens_per_second


def measure_speed(
    redrafter: Redrafter,
    prompts: Sequence[Sequence[int]],
    shapes: Sequence[BeamShape],
    max_tokens: int = TIMED_TOKENS,
    done: Callable[[int], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[MeasuredRow]:
    """Answer each prompt plainly and with each shape in turn, greedily.

    Interleaved, so that a machine that slows down slows all of them down: a speedup is the median
    of the questions' ratios, and a shape's tokens a second are that many times the median of plain
    decoding. An answer of a few tokens says nothing of speed and is left out. After `stop()` no
    more prompts are answered.
    """
    plain: list[float] = []
    drafted: dict[BeamShape, list[tuple[float, float]]] = {shape: [] for shape in shapes}
    for i, prompt in enumerate(prompts):
        alone = redrafter.generate(prompt, max_tokens=max_tokens, draft=False)
        if len(alone.token_ids) >= min(16, max_tokens):
            plain.append(alone.generation_tps)
            for shape in shapes:
                answer = redrafter.generate(
                    prompt,
                    max_tokens=max_tokens,
                    beam_width=shape.width,
                    beam_length=shape.length,
                    max_nodes=shape.max_nodes,
                )
                drafted[shape].append((answer.generation_tps, answer.tokens_per_step))
        done(i + 1)
        if stop():
            break
    if not plain:
        return []
    base = statistics.median(plain)
    found = []
    for shape, rows in drafted.items():
        speedup = statistics.median(
            tps / alone for (tps, _), alone in zip(rows, plain, strict=True)
        )
        per_step = statistics.median(per_step for _, per_step in rows)
        found.append(
            MeasuredRow(shape.width, shape.length, shape.nodes, per_step, speedup * base, base)
        )
    return found


def verdict(measured: Sequence[MeasuredRow]) -> str:
    """One plain sentence: is it faster on this machine or not, and with which beams?"""
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
