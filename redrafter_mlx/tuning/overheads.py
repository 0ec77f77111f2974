"""The overhead of a step: what it takes beyond the target's call and the drafting."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.response import StepResult
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.cost import OVERHEADS
from redrafter_mlx.tuning.timed_calls import Call, next_seconds
from redrafter_mlx.tuning.timings import SHORT_CONTEXT, Case

_STEPS = 6
"""Number of steps that are compared with their parts."""

_REPEATS = 3
"""Number of times that steps and parts are measured, if the budget allows."""


def measure_overheads(
    target: Target,
    drafter: Drafter | None,
    widest: int,
    call: Callable[[Case], Call],
    one_row: float,
    budget: float,
) -> dict[Case, float]:
    """Measure a step's overhead beyond its parts: plain, with one beam and with several.

    A step and its parts are measured in turn, and the shortest of each are compared: the
    overhead is small, and other work on the machine adds more. Plain steps can take less than a
    call alone, as the host works ahead. Despite noise, a plain step gets the smallest overhead
    and a step with several beams the largest, and none is more than a one-row call, or takes
    off more than half of one.

    Args:
      widest: maximum number of beams drafted for a sequence
      call: returns the call of a case
      one_row: seconds of a one-row call
    """
    parts: dict[BeamShape, list[Call]] = {}
    for shape in OVERHEADS if drafter is not None else [PLAIN]:
        shape = replace(shape, width=min(shape.width, widest or 1))
        parts[shape] = [call(("call", shape.nodes, SHORT_CONTEXT))]
        if shape != PLAIN:
            parts[shape].append(call(("draft", shape.width, shape.length)))
    steps: list[list[float]] = [[] for _ in parts]
    sums: list[list[float]] = [[] for _ in parts]
    prompt = [(7 * i + 1) % target.vocab_size for i in range(SHORT_CONTEXT)]
    began = time.perf_counter()
    while not steps[0] or (len(steps[0]) < _REPEATS and time.perf_counter() - began < budget):
        for i, (shape, calls) in enumerate(parts.items()):
            decoder = Decoder(target, drafter, shape, SamplingParams())
            steps[i].append(step_seconds(decoder, prompt, _STEPS))
            with target.in_use():
                sums[i].append(sum(_shortest_seconds(target, call) for call in calls))
    found = [min(s) - min(p) for s, p in zip(steps, sums, strict=True)]
    rising = [*accumulate((max(-one_row / 2, min(rest, one_row)) for rest in found), max)]
    cases: list[Case] = [("overhead", s.width, s.length) for s in OVERHEADS]
    of_copies = max(rising[-1], 0.0)  # without a drafter nothing else is drafted
    return dict(zip(cases, [*rising, of_copies, of_copies], strict=False))


def step_seconds(decoder: Decoder, prompt: list[int], steps: int) -> float:
    """Measure a step of the decoding loop after a prompt: of `steps`, the shortest half in a row.

    Single steps would not do: one that is read late makes the next one seem short.
    """
    read: list[float] = []

    def finished(_: StepResult) -> bool:
        read.append(time.perf_counter())
        return len(read) == steps + 2  # the prompt, and a first step that compiles

    for _ in decode(decoder, decoder.new_cache(), 0, prompt, sequence_keys(0), finished):
        pass
    half = steps // 2
    return min(b - a for a, b in zip(read[1:], read[1 + half :], strict=False)) / half


def _shortest_seconds(target: Target, call: Call) -> float:
    """Return the shortest of as many measurements as there are steps to compare it with."""
    return min(next_seconds(target, call) for _ in range(_STEPS // 2))
