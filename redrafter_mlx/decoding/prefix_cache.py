"""What a conversation keeps from turn to turn: the cache of the text that was read."""

from __future__ import annotations

from collections.abc import Sequence

from redrafter_mlx.decoding.loop import Decoder
from redrafter_mlx.decoding.sequence_cache import SequenceCache


class PrefixCache:
    """A cache and the tokens that it holds, reused as far as the next prompt agrees.

    The cache is handed out and comes back with `keep`; in between there is none, so that an answer
    that breaks off costs a re-reading and never a wrong position.
    """

    def __init__(self) -> None:
        self._cache: SequenceCache | None = None
        self.tokens: list[int] = []

    def take(self, prompt: Sequence[int], decoder: Decoder) -> tuple[SequenceCache, int]:
        """A cache for `prompt` and how many of its first tokens need not be read again.

        The last token is always read: the first choice follows from its hidden state.
        """
        cache, tokens = self._cache, self.tokens
        self.clear()
        if cache is None:
            return decoder.new_cache(), 0
        common = common_prefix(tokens, prompt[:-1])
        if decoder.drafter is None:
            return cache, common
        return cache, cache.reuse(prompt[:common], decoder.drafter)

    def keep(self, cache: SequenceCache, tokens: list[int]) -> None:
        """Take `cache` back, whose first positions are those of `tokens`."""
        cache.flush()
        self._cache, self.tokens = cache, tokens

    def clear(self) -> None:
        self._cache, self.tokens = None, []


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first elements are the same in both."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
