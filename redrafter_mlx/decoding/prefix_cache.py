"""What a conversation remembers: the keys and values of the tokens that it has read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from redrafter_mlx.target.kv_cache import TreeCache


class PrefixMemory:
    """A cache and the tokens whose rows it holds, reused as far as the next prompt agrees.

    The cache is handed out and comes back with `keep`; in between the memory is empty, so that
    an answer that breaks off costs a re-reading and never a wrong row.
    """

    def __init__(self) -> None:
        self._cache: TreeCache | None = None
        self.tokens: list[int] = []

    def take(self, prompt: Sequence[int], new: Callable[[], TreeCache]) -> tuple[TreeCache, int]:
        """A cache for `prompt` and how many of its first tokens need not be read again.

        The last token is always read: its hidden state is the drafter's context.
        """
        cache, tokens = self._cache, self.tokens
        self.clear()
        if cache is None:
            return new(), 0
        return cache, common_prefix(tokens, prompt[:-1])

    def keep(self, cache: TreeCache, tokens: list[int]) -> None:
        """Take `cache` back, whose first rows are those of `tokens`."""
        cache.settle()
        mx.eval(cache.buffers)
        self._cache, self.tokens = cache, tokens

    def clear(self) -> None:
        self._cache, self.tokens = None, []


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first elements are the same in both."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
