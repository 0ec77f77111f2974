"""What a caller gets: one response a token, or a whole answer."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from redrafter_mlx.report import StepResult


@dataclass(frozen=True)
class Response:
    """One token, with the fields of mlx-lm's `GenerationResponse` and two of ours.

    text:              what this token makes certain; may be empty, or more than the token
    from_draft:        whether the drafter had guessed it
    prompt_tps:        prompt tokens read per second (those reused from an earlier turn not counted)
    generation_tps:    tokens a second behind the first one
    peak_memory:       GB
    finish_reason:     "stop" or "length" on the last response, else None
    steps:             target calls after the prompt so far
    tokens_per_step:   tokens from those calls divided by them; 1.0 for auto-regression
    """

    text: str
    token: int
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None
    steps: int
    tokens_per_step: float
    step: StepResult
    place: int

    @property
    def logprobs(self) -> mx.array:
        """The target's log-probabilities [V] float32 that this token was chosen from."""
        return self.step.log_probs(self.place)


@dataclass(frozen=True)
class Completion:
    """A whole answer; `token_ids` holds the ending token too, `text` does not."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    steps: int
    tokens_per_step: float
    prompt_tps: float
    generation_tps: float
    peak_memory: float
