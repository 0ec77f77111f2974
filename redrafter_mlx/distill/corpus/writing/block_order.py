"""Which prompts are in which block of a corpus, and which blocks are held out.

It depends only on the prompts and the options; no model is called.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256

from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.shards import HELD_OUT_EVERY
from redrafter_mlx.distill.options import WritingOptions

_SORTED_BLOCKS = 8
"""Number of blocks within which prompts are sorted by length: little padding, still a mixture."""


@dataclass(frozen=True)
class BlockOrder:
    """The order of blocks: some hold the user's prompts, all others prompts of the target's own."""

    prompts: Sequence[Conversation]  # the user's prompts, none if the target writes all of them
    options: WritingOptions

    def held_out(self, block: int) -> bool:
        """Whether a block is for evaluation, never for training: one in HELD_OUT_EVERY.

        The user's prompts in a held-out block are never in a training block, however often they are
        asked. Of a few prompts all are trained on, if the target writes others.
        """
        if self.is_own(block):
            return self.own_before(block) % HELD_OUT_EVERY == 0
        if self._own_share > 0 and self.n_parts < HELD_OUT_EVERY:
            return False
        return self.round_and_part(block)[1] % HELD_OUT_EVERY == 0

    def has_new_prompts(self, block: int) -> bool:
        """Whether the prompts of a block are in no earlier block."""
        return self.is_own(block) or self.round_and_part(block)[0] == 0

    def is_own(self, block: int) -> bool:
        """Whether the target writes the prompts of a block."""
        return in_share(block, self._own_share)

    def own_before(self, block: int) -> int:
        return _count_in_share(block, self._own_share)

    @property
    def _own_share(self) -> float:
        return self.options.own_share if self.prompts else 1.0

    def round_and_part(self, block: int) -> tuple[int, int]:
        """Return how often all the user's prompts were asked before, and which part is next."""
        return divmod(block - self.own_before(block), self.n_parts)

    @property
    def part_size(self) -> int:
        """Number of prompts in a block."""
        return self.options.batch // len(self.options.openings)

    @property
    def n_parts(self) -> int:
        """Number of blocks in which all the user's prompts are asked once."""
        return -(-len(self.prompts) // self.part_size)

    @cached_property
    def parts(self) -> list[list[Conversation]]:
        """The user's prompts, block by block of a round.

        The held-out ones are those with the smallest digests, whatever the seed: runs that start
        from each other's drafters, with as many of the same prompts in a block, hold out the same.
        """
        size, seed = self.part_size, self.options.seed
        by_digest = sorted(
            self.prompts, key=lambda p: sha256(json.dumps(asdict(p)).encode()).digest()
        )
        apart = size * -(-self.n_parts // HELD_OUT_EVERY)
        held_out, others = by_digest[:apart], by_digest[apart:]
        random.Random(seed).shuffle(held_out)
        random.Random(seed).shuffle(others)
        found: list[list[Conversation]] = []
        for at in range(0, len(others), _SORTED_BLOCKS * size):
            span = others[at : at + _SORTED_BLOCKS * size]
            span.sort(key=lambda conversation: sum(map(len, conversation.turns)))
            sorted_ = [span[i : i + size] for i in range(0, len(span), size)]
            random.Random(f"{seed} {at}").shuffle(sorted_)  # a short run has prompts of any length
            found += sorted_
        for at in range(0, len(held_out), size):
            found.insert(at // size * HELD_OUT_EVERY, held_out[at : at + size])
        return found


def _count_in_share(block: int, share: float) -> int:
    """Return how many blocks before `block` belong to an evenly spread share of all blocks."""
    return int(block * share + 1e-9)


def in_share(block: int, share: float) -> bool:
    return _count_in_share(block + 1, share) > _count_in_share(block, share)
