"""Prefill in chunks, so that other answers are decoded in between."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from redrafter_mlx.decoding.cache.checkpoints import stops
from redrafter_mlx.decoding.cache.sequence_cache import SequenceCache
from redrafter_mlx.drafting.interface import Drafter, Features, Seen
from redrafter_mlx.target_model.model import Target

PREFILL_CHUNK = 2048
"""Prompt tokens per call, as in mlx-lm."""


class Prefill:
    """The prefill of a batch of prompts of one length, from position `start` on.

    Shapes:
      hidden: [B, 1, C], hidden states at the prompts' last token, once all of it is read

    left:     number of unread tokens of a prompt
    position: position of the first unread token
    """

    hidden: mx.array

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        cache: SequenceCache,
        start: int,
        prompts: Sequence[Sequence[int]],
        drafts: bool = True,
    ) -> None:
        """`drafts`: whether it drafts after the prompt; otherwise the drafter may read it later."""
        self._target, self._drafter, self._drafts = target, drafter, drafts
        self._start, self._length = start, len(prompts[0])
        self._tokens = mx.array([[*prompt[start:], 0] for prompt in prompts], mx.int32)
        self.cache, self.position, self.left = cache, start, self._length - start
        forgetful, parted = cache.target.forgetful, cache.parted
        window = 0 if target.states else max(target.windows.values(), default=0)
        keeps = forgetful and parted is not None
        self._stops = stops(start, self._length, parted or 0, window) if keeps else []

    @property
    def begun(self) -> bool:
        """Whether a part of the prompts was read."""
        return self.position > self._start

    def read(self, max_tokens: int) -> None:
        """Submit the next chunk, at most `max_tokens`, up to the next checkpoint."""
        at, P = self.position - self._start, min(max_tokens, self.left)
        if self._stops:
            P = min(P, self._stops[0] - self.position)
        hidden = self._target.append(
            self._tokens[:, at : at + P], self.cache.target, self.position, self._length
        )
        self._show(at, hidden)
        self.position += P
        self.left -= P
        if self.position in self._stops:
            self._stops.remove(self.position)
            self.cache.keep_states(self.position)
        last = []
        if not self.left:  # those of earlier chunks are not computed
            self.hidden = hidden[:, -1:]
            last = [self.hidden]
        mx.async_eval(*self.cache.target.buffers, *last, *self.cache.of_drafter)

    def wait(self) -> None:
        """Wait until the chunks read so far are computed, and free their working memory."""
        mx.eval(self.cache.target.buffers, self.cache.of_drafter)
        mx.clear_cache()

    def _show(self, at: int, hidden: mx.array) -> None:
        """Show a chunk to the drafter: all positions whose next token is in the prompt."""
        features = Features() if self._drafter is None else self._drafter.features
        B, P, _ = hidden.shape
        count = min(self.left - 1, P)
        if self._drafter is None or not features.every_position or not count:
            return
        seen = Seen(
            self._tokens[:, at : at + count + 1],
            hidden[:, :count] if features.any else None,
            mx.full((B,), self.position, mx.int32),
            mx.full((B,), count, mx.int32),
            self._length,
            self.position,
        )
        self.cache.show(seen, self._drafter, drafts=self._drafts)
