"""The positions of texts after which a drafter drafts, with its memory there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx.utils import tree_map

from redrafter_mlx.distill.corpus.examples import Batch, lay_out
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.drafting.interface import Memory, Seen
from redrafter_mlx.drafting.level_drafter import DraftLevels, LevelDrafter

_POSITIONS = 512
"""Maximum number of positions in one call of the drafter, which bounds its use of memory."""

_POSITIONS_WITH_MEMORY = 32
"""The same if each position comes with a copy of the drafter's memory of the text."""


@dataclass(frozen=True)
class Roots:
    """Some roots and the labels after them, and the drafter's input there."""

    drafter: LevelDrafter
    batch: Batch
    memory: Memory
    seen: Seen

    def levels(self, drafts: int) -> DraftLevels:
        """Return the draft levels after the roots, of which the first `drafts` will be used."""
        return self.drafter.levels(self.memory, self.seen, drafts)


def roots_along(
    drafter: LevelDrafter, texts: Sequence[Text], drafts: int, dtype: mx.Dtype = mx.float32
) -> Iterator[Roots]:
    """Yield every answer token of texts in turn as a root, with the `drafts` labels after it.

    A drafter with memory needs the states of the prompts as well.

    dtype: type of the states that the drafter gets
    """
    drafter, laid = drafter.uncompiled(), lay_out(texts, drafts)
    every = drafter.features.every_position
    parts = [len(text.answer) for text in texts] if every else [len(laid)]
    at = 0
    for part, size in enumerate(parts):
        memory = _memory_of(drafter, texts[part], dtype) if every else ()
        end, most = at + size, _POSITIONS_WITH_MEMORY if every else _POSITIONS
        while at < end:
            n = min(most, end - at)
            batch, root_at = laid.batch(at, n), laid.root_at[at : at + n]
            states = batch.states[:n, None].astype(dtype)
            once = mx.ones((n,), mx.int32)
            tokens = mx.stack([mx.zeros_like(batch.roots), batch.roots], axis=1)
            seen = Seen(tokens, states, mx.array(root_at - 1), once, int(root_at.max()))
            copied = tree_map(lambda array, n=n: mx.repeat(array, n, axis=0), memory)
            yield Roots(drafter, batch, copied, seen)
            at += n


def _memory_of(drafter: LevelDrafter, text: Text, dtype: mx.Dtype) -> Memory:
    """Return a drafter's memory of a whole text."""
    tokens = mx.array([[*text.prompt, *text.answer.tolist()]])
    states = mx.array(text.whole_states[None]).astype(dtype) if drafter.features.any else None
    count = tokens.shape[1] - 1
    zero = mx.zeros((1,), mx.int32)
    return drafter.extend(
        drafter.empty(1), Seen(tokens, states, zero, zero + count, count, start=0)
    )
