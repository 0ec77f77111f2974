"""Statistics of one answer, and the responses that report them."""

from __future__ import annotations

import time
from collections import Counter

import mlx.core as mx

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.response import Response, StepResult


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
        self._shapes: Counter[BeamShape] = Counter()
        self._nodes: Counter[BeamShape] = Counter()

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
        if self._steps:
            self._shapes[result.shape] += 1
            self._nodes[result.shape] += result.nodes
        else:
            self._first = self._now

    def response(self, text: str, finish_reason: str | None, stop: str | None) -> Response:
        """Build the response for the next token of the step that was counted last."""
        assert self._result is not None
        steps, index, result = self._steps, self._index, self._result
        self._index += 1
        self.tokens += 1
        after_first = self.tokens - 1
        usual = _usual(self._shapes) if self._shape_is_chosen else None
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
            usual_shape=usual,
            usual_nodes=None if usual is None else self._nodes[usual] / self._shapes[usual],
            step=result,
            index=index,
            stop=stop,
        )


def _usual(shapes: Counter[BeamShape]) -> BeamShape | None:
    """Return PLAIN if most steps were plain, else the most frequent other shape."""
    drafted = Counter({shape: n for shape, n in shapes.items() if shape != PLAIN})
    if 2 * shapes[PLAIN] > shapes.total() or not drafted:
        return PLAIN if shapes else None
    return drafted.most_common(1)[0][0]
