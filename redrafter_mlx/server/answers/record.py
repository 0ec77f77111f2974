"""Statistics of one answer so far, and the text and source of each step's tokens."""

from __future__ import annotations

import time
from typing import Any

from redrafter_mlx.response import Response
from redrafter_mlx.server.answers.answering import Emitted


class Record:
    """Accumulates the steps of one answer.

    arrived: when the request came, by `time.perf_counter`
    drafted, accepted: number of draft tokens so far
    """

    def __init__(self, arrived: float) -> None:
        self._arrived = arrived
        self.first_token_seconds: float | None = None
        self.drafted = 0
        self.accepted = 0
        self._last: Response | None = None

    @property
    def incomplete(self) -> bool:
        """Whether something was emitted, and not the end of the answer."""
        return self._last is not None and self._last.finish_reason is None

    @property
    def last(self) -> Response:
        assert self._last is not None, "nothing was emitted yet"
        return self._last

    @property
    def seconds(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self._arrived

    def add(self, emitted: Emitted) -> None:
        if self.first_token_seconds is None:
            self.first_token_seconds = self.seconds
        self._last = emitted.last
        self.drafted += emitted.drafted
        self.accepted += emitted.accepted

    @property
    def timings(self) -> dict[str, float]:
        """The `timings` object of llama-server."""
        last = self.last
        read = last.prompt_tokens - last.cached_tokens
        prompt_ms = 1000 * read / last.prompt_tps
        rate, predicted = last.generation_tps, last.generation_tokens
        predicted_ms = 1000 * (predicted - 1) / rate if rate else 0.0
        return {
            "prompt_n": read,
            "prompt_ms": round(prompt_ms, 3),
            "prompt_per_second": round(last.prompt_tps, 3),
            "predicted_n": predicted,
            "predicted_ms": round(predicted_ms, 3),
            "predicted_per_second": round(rate, 3),
            "draft_n": self.drafted,
            "draft_n_accepted": self.accepted,
            "cache_n": last.cached_tokens,
        }


def own_fields(emitted: Emitted) -> dict[str, Any]:
    """Return `x_redrafter`: a step, its tokens and its draft tokens, and the rates so far."""
    last = emitted.last
    tokens = [{"id": r.token, "text": r.text, "source": r.source} for r in emitted.responses]
    return {
        "step": last.steps,
        "tokens": tokens,
        "drafted": emitted.drafted,
        "accepted": emitted.accepted,
        "tokens_per_step": round(last.tokens_per_step, 3),
        "tokens_per_second": round(last.generation_tps, 3),
    }
