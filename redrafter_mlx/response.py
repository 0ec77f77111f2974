"""What a caller receives: one response per token, or a whole answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import mlx.core as mx

from redrafter_mlx.config import BeamShape

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
