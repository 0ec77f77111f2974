"""What a caller receives: one response per token, with statistics, or a whole answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import mlx.core as mx

from redrafter_mlx.config import PLAIN, BeamShape

_T = TypeVar("_T")

Source: TypeAlias = Literal["model", "drafter", "lookup"]
"""Where an emitted token came from: the target's own choice, or an accepted draft."""


@dataclass(frozen=True)
class StepResult:
    """One row's step as the host sees it.

    tokens:    emitted tokens: the accepted drafts and the bonus token
    sources:   where each token came from; a draft that both drafter and lookup proposed is the
               drafter's
    path:      the node after which each token was chosen
    beams:     of each node that is not padding, the smallest beam width that contains it, minus one
    depths:    of the same nodes
    shape:     shape that the tree was drafted with
    query_rows: of the target's call for this tree: nodes and padding
    from_host: whether the tree held continuations from the host, such as n-gram matches
    seconds:   since the previous step was read, on the host; None if that is not a step's time
    log_probs: the target's log-probabilities [V] float32 that each token was chosen from, on the
               device; None unless requested
    """

    tokens: list[int]
    sources: list[Source]
    path: list[int]
    beams: list[int]
    depths: list[int]
    shape: BeamShape
    query_rows: int
    from_host: bool = False
    seconds: float | None = None
    log_probs: list[mx.array] | None = None

    @property
    def nodes(self) -> int:
        """Number of tree nodes that are not padding."""
        return len(self.beams)


@dataclass(frozen=True)
class Response:
    """One token: mlx-lm's `GenerationResponse` without `from_draft` (see `source`), and more.

    text:              the text that this token completes; may be empty, or more than the token's
    source:            "model" for the target's own choice, "drafter" or "lookup" for an accepted
                       draft
    prompt_tps:        prompt tokens read per second (cached ones not counted)
    cached_tokens:     prompt tokens that were in the prefix cache and did not have to be read
    generation_tps:    tokens per second, counted from the first one
    peak_memory:       GB
    finish_reason:     "stop" or "length" on the last response, else None
    steps:             target calls after the prompt so far
    tokens_per_step:   number of tokens per target call after the prompt; 1.0 for plain decoding
    usual_shape:       shape of most steps so far; None if the options name it
    usual_nodes:       mean number of nodes verified in those steps; None as above
    step:              the step that emitted this token
    index:             index of this token in the step
    stop:              the stop string that ended the answer; None if there was none
    """

    text: str
    token: int
    source: Source
    prompt_tokens: int
    prompt_tps: float
    cached_tokens: int
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None
    steps: int
    tokens_per_step: float
    usual_shape: BeamShape | None
    usual_nodes: float | None
    step: StepResult
    index: int
    stop: str | None = None

    @property
    def logprobs(self) -> mx.array | None:
        """The target's log-probabilities [V] float32 that this token was chosen from.

        None unless GenerationOptions.logprobs is set.
        """
        return None if self.step.log_probs is None else self.step.log_probs[self.index]


class Ended(NamedTuple):
    """A task's last event: it has ended, with this error if there was one."""

    error: BaseException | None = None


Emit = Callable[[_T | Ended], None]
"""Sends an event of a task to the caller that listens."""


@dataclass(frozen=True)
class Completion:
    """A whole answer; `token_ids` holds the ending token too, `text` does not.

    shapes: shape of the drafts in each step after the prompt
    logprobs: of each token, see `Response.logprobs`; None unless they were asked for
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    steps: int
    tokens_per_step: float
    prompt_tps: float
    generation_tps: float
    peak_memory: float
    shapes: list[BeamShape]
    logprobs: list[mx.array] | None = None

    @classmethod
    def of(cls, prompt_ids: list[int], responses: Sequence[Response]) -> Completion:
        """Build the answer from all of its responses."""
        last = responses[-1]
        assert last.finish_reason is not None, "the answer has ended"
        return cls(
            prompt_ids=prompt_ids,
            token_ids=[r.token for r in responses],
            text="".join(r.text for r in responses),
            finish_reason=last.finish_reason,
            steps=last.steps,
            tokens_per_step=last.tokens_per_step,
            prompt_tps=last.prompt_tps,
            generation_tps=last.generation_tps,
            peak_memory=last.peak_memory,
            shapes=[r.step.shape for r in responses if r.index == 0 and r.steps > 0],
            logprobs=[p for r in responses if (p := r.logprobs) is not None] or None,
        )


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
