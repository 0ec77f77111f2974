"""Candidates: the few beam shapes that are worth a choice on a machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from redrafter_mlx.autotune.cost_model import CostModel
from redrafter_mlx.config import BeamShape

WIDEST = 4
LENGTHS = (2, 3, 4, 5, 6, 8)
"""Only these shapes are chosen automatically."""

_NODES = (6, 8, 10, 13, 16, 20, 24, 28)
"""Trees are cut to these sizes, each about a quarter more than the one before, and at cliffs."""


def candidates(
    costs: CostModel,
    widest: int = WIDEST,
    longest: int = LENGTHS[-1],
    batches: Sequence[int] = (1,),
) -> tuple[BeamShape, ...]:
    """Every shape that may promise most in batches of so many rows, plain decoding aside.

    Every width and length whose drafting has a cost, whole, and cut to a ladder of row counts and
    at cliffs, with room for a draft of each beam: a beam that no node is left for only costs. A
    shape is left out when a larger one costs no more at either context: it would never be better.
    """
    widest = min(widest, WIDEST, max((w for w, *_ in costs.draft), default=0))
    longest = min(longest, max((n for _, n, _ in costs.draft), default=0))
    cuts = sorted({*_NODES, *costs.cliffs()})
    found = set()
    for width in range(1, widest + 1):
        for length in (n for n in LENGTHS if n <= longest):
            full = width * (length - 1) + 1
            for nodes in (full, *(n for n in cuts if max(length, full // 3) <= n < full)):
                if width < nodes <= costs.most_nodes:
                    found.add(BeamShape(width, length, nodes))
    shapes = sorted(found, key=lambda s: (s.nodes, s.length, s.width))
    cases = [(c, b) for c in (costs.short_context, costs.long_context) for b in batches]
    # What a larger shape has more of is positive here, and what it costs less of too.
    sizes = np.array(
        [(s.width, s.length, s.nodes, *(-costs.step(s, c, b) for c, b in cases)) for s in shapes]
    ).reshape(-1, 3 + len(cases))
    no_worse = np.all(sizes[:, None] >= sizes[None], axis=2)  # [other, shape]
    np.fill_diagonal(no_worse, False)
    return tuple(s for s, beaten in zip(shapes, no_worse.any(axis=0), strict=True) if not beaten)
