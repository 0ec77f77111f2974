"""The oracle drafter: it knows the text, and makes some errors.

With a good drafter most of a text is accepted, with a bad one almost none. The oracle drafts the
text that a target is about to generate, wrong from random depths on and among random tokens. So
every accepted length occurs, and decoding is tested where it could go wrong. It does not measure
speed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.interface import Drafter, Memory, Seen
from redrafter_mlx.speculation.beams import Beams

_PERIOD = 1009
"""Number of positions after which the pattern of errors repeats; a prime, so that it drifts."""


@dataclass(frozen=True)
class Oracle(Drafter, well_formed=True):
    """A drafter that knows the answer.

    text:  the whole text, prompt included; token 0 is drafted after its end
    vocab: wrong tokens are drawn below it
    """

    text: Sequence[int]
    vocab: int
    seed: int = 0

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        """Draft one sequence; at every other position several candidates share a true prefix."""
        root, position = seen.root, seen.root_position
        W, L = shape.width, shape.length
        rng = random.Random(self.seed)
        wrong_from = mx.array([rng.randrange(1, L + 1) for _ in range(_PERIOD)])
        wrong = mx.array([rng.randrange(self.vocab) for _ in range(_PERIOD * W * L)])
        known = mx.array([*self.text, *[0] * (L + 1)])

        at = position % _PERIOD
        index = mx.minimum(position[:, None] + mx.arange(L)[None], len(self.text) + L)
        true = known[index][:, None]  # [1, 1, L]
        depth, beam = mx.arange(L)[None, None], mx.arange(W)[None, :, None]
        right = depth < wrong_from[at][:, None, None]
        tokens = wrong.reshape(_PERIOD, W, L)[at]
        tokens = mx.where((beam == at % W) & right, true, tokens)
        shared = (at % 2 == 0)[:, None, None] & (depth < L // 2) & right
        tokens = mx.where(shared, true, tokens)
        tokens = mx.where(depth == 0, root[:, None, None], tokens)
        scores = -depth.astype(mx.float32) - beam * 1e-3 * (depth > 0)
        return Beams(tokens.astype(mx.int32), mx.broadcast_to(scores, tokens.shape)), memory
