"""A short real measurement: drafted decoding beside plain decoding, question by question."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redrafter_mlx.config import BeamShape
from redrafter_mlx.generate import Redrafter


@dataclass(frozen=True)
class MeasuredShape:
    """One beam shape beside plain decoding, medians over questions.

    tokens_per_second, plain_tokens_per_second: behind the first token
    speedup: the median of the questions' ratios
    """

    width: int
    length: int
    nodes: int
    tokens_per_step: float
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float


def measure_speed(
    redrafter: Redrafter,
    prompts: Sequence[Sequence[int]],
    shapes: Sequence[BeamShape],
    max_tokens: int,
    done: Callable[[int], None] = lambda _: None,
) -> list[MeasuredShape]:
    """Answer each prompt plainly and with each shape in turn, greedily.

    Interleaved, so that a machine that slows down slows all of them down. An answer of a few
    tokens says nothing of speed and is left out.
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
    if not plain:
        return []
    return [
        MeasuredShape(
            shape.width,
            shape.length,
            shape.nodes,
            statistics.median(per_step for _, per_step in rows),
            statistics.median(tps for tps, _ in rows),
            statistics.median(plain),
            statistics.median(tps / base for (tps, _), base in zip(rows, plain, strict=True)),
        )
        for shape, rows in drafted.items()
    ]


def verdict(rows: Sequence[MeasuredShape]) -> str:
    """Faster or not, on this machine, in one sentence."""
    if not rows:
        return "no answer was long enough to be timed"
    best = max(rows, key=lambda row: row.speedup)
    shape = f"width {best.width}, length {best.length}"
    if best.speedup >= 1.02:
        return f"faster on this machine: {best.speedup:.2f} times plain decoding with {shape}"
    if best.speedup > 0.98:
        return f"no faster on this machine: {best.speedup:.2f} times plain decoding with {shape}"
    return (
        f"slower on this machine: {best.speedup:.2f} times plain decoding at best ({shape}); "
        f"it decodes plainly by itself where drafting does not pay"
    )
