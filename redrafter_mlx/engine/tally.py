"""Statistics of one answer, and the responses that report them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import mlx.core as mx

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.response import Response, StepResult


@dataclass(slots=True)
class _Steps:
    """The number of an answer's steps of one shape, and of the nodes that they verified."""

    shape: BeamShape
    count: int = 0
    nodes: int = 0


class Tally:
    """Statistics of one answer while it is generated.

    tokens: number of responses so far
    cached: number of prompt tokens that were not read, as the prefix cache holds them
    """

    def __init__(self, prompt_tokens: int, *, shape_is_chosen: bool) -> None:
        """`shape_is_chosen`: whether a shape is reported, because the options do not name it."""
        self.tokens = 0
        self._prompt_tokens = prompt_tokens
        self.cached = 0
        self._shape_is_chosen = shape_is_chosen
        self._began = self._first = self._now = time.perf_counter()
        self._steps = -1
        self._index = 0
        self._result: StepResult | None = None
        self._plain = _Steps(PLAIN)
        self._drafted: _Steps | None = None  # of the most frequent other shape
        self._by_shape = {PLAIN: self._plain}

    def start(self, cached: int) -> None:
        """Start the clock: the prompt is read now, except for `cached` tokens."""
        self.cached = cached
        self._began = self._first = self._now = time.perf_counter()

    @property
    def steps(self) -> int:
        """Number of target calls after the prompt."""
        return max(self._steps, 0)

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first token to the last one read."""
        return self._now - self._first

    def count(self, result: StepResult) -> None:
        """Count a step's result; the first one is the prompt's."""
        self._now = time.perf_counter()
        self._steps += 1
        self._index, self._result = 0, result
        if self._steps == 0:
            self._first = self._now
            return
        of_shape = self._by_shape.get(result.shape)
        if of_shape is None:
            of_shape = self._by_shape[result.shape] = _Steps(result.shape)
        of_shape.count += 1
        of_shape.nodes += result.nodes
        if of_shape is not self._plain and (
            self._drafted is None or of_shape.count > self._drafted.count
        ):
            self._drafted = of_shape

    def response(self, text: str, finish_reason: str | None, stop: str | None) -> Response:
        """Build the response for the next token of the step that was counted last."""
        assert self._result is not None
        steps, index, result = self._steps, self._index, self._result
        self._index += 1
        self.tokens += 1
        after_first = self.tokens - 1
        usual = self._usual()
        return Response(
            text=text,
            token=result.tokens[index],
            source=result.sources[index],
            prompt_tokens=self._prompt_tokens,
            prompt_tps=(self._prompt_tokens - self.cached) / max(self._first - self._began, 1e-9),
            cached_tokens=self.cached,
            generation_tokens=self.tokens,
            generation_tps=after_first / max(self._now - self._first, 1e-9) if steps else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish_reason,
            steps=steps,
            tokens_per_step=after_first / steps if steps else 1.0,
            usual_shape=None if usual is None else usual.shape,
            usual_nodes=None if usual is None else usual.nodes / usual.count,
            step=result,
            index=index,
            stop=stop,
        )

    def _usual(self) -> _Steps | None:
        """Return the plain steps if most were plain, else those of the most frequent other shape.

        None if no shape is reported, or before the first step.
        """
        if not self._shape_is_chosen or self._steps <= 0:
            return None
        most_are_plain = 2 * self._plain.count > self._steps
        return self._plain if self._drafted is None or most_are_plain else self._drafted
