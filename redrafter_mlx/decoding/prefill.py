"""Prefill in chunks, so that other answers are decoded in between."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from redrafter_mlx.decoding.sequence_cache import SequenceCache
from redrafter_mlx.drafting.interface import Drafter, Features, Seen
from redrafter_mlx.target.model import Target

PREFILL_CHUNK = 2048
"""Prompt tokens per call, as in mlx-lm."""


class Prefill:
    """The prefill of a batch of prompts, from position `start` on.

    Prompts may differ in length; shorter ones are padded on the right.

    left:     number of unread tokens of the longest prompt
    position: position of the first unread token
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        cache: SequenceCache,
        start: int,
        prompts: Sequence[Sequence[int]],
        parked: bool = False,
    ) -> None:
        """`parked`: nothing is drafted after the prompt, so the drafter may read it later."""
        fresh = [list(prompt[start:]) for prompt in prompts]
        width = max(map(len, fresh))
        self.cache, self.left = cache, width
        self._target, self._drafter, self._parked = target, drafter, parked
        self._start, self._read, self._length = start, 0, start + width
        self._lengths = [len(row) for row in fresh]
        self._padded = mx.array([row + [0] * (width + 1 - len(row)) for row in fresh], mx.int32)
        self._context: dict[int, mx.array] = {}

    def read(self, most: int) -> None:
        """Submit the next chunk, at most `most` tokens."""
        at, P = self._read, min(most, self.left)
        hidden = self._target.append(
            self._padded[:, at : at + P], self.cache.target, self._start + at, self._length
        )
        self._show(at, hidden)
        for b, length in enumerate(self._lengths):
            if at < length <= at + P:
                self._context[b] = hidden[b, length - 1 - at]
        mx.async_eval(*self.cache.target.buffers, *self._context.values(), *self.cache.of_drafter)
        self._read += P
        self.left -= P

    def wait(self) -> None:
        """Wait until the chunks read so far are computed, and free their working memory."""
        mx.eval(self.cache.target.buffers, self.cache.of_drafter)
        mx.clear_cache()

    @property
    def position(self) -> int:
        return self._start + self._read

    @property
    def context(self) -> mx.array:
        """Hidden states [B, 1, C] at each prompt's last token, once all prompts are read."""
        return mx.stack([self._context[b] for b in range(len(self._lengths))])[:, None]

    def _show(self, at: int, hidden: mx.array) -> None:
        """Show a chunk to the drafter: all positions whose next token is in the prompt."""
        features = Features() if self._drafter is None else self._drafter.features
        P = hidden.shape[1]
        count = [min(max(length - 1 - at, 0), P) for length in self._lengths]
        if self._drafter is None or not features.every_position or not any(count):
            return
        seen = Seen(
            self._padded[:, at : at + P + 1],
            hidden if features.any else None,
            mx.full((len(count),), self._start + at, mx.int32),
            mx.array(count, mx.int32),
            self._length,
            self._start + at,
        )
        self.cache.show(seen, self._drafter, parked=self._parked)
