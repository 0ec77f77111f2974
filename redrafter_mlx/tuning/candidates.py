"""Candidates: the few beam shapes that are worth considering on a machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from redrafter_mlx.config import BeamShape
from redrafter_mlx.tuning.cost import CostModel

WIDEST = 4
LENGTHS = (2, 3, 4, 5, 6, 8)
"""Maximum width, and the lengths, of shapes that are chosen automatically."""

_NODES = (6, 8, 10, 13, 16, 20, 24, 28)
"""Node counts that trees are cut to, besides those at cliffs; each is about a quarter larger than
the one before."""


def candidates(
    costs: CostModel,
    widest: int = WIDEST,
    longest: int = LENGTHS[-1],
    batches: Sequence[int] = (1,),
) -> tuple[BeamShape, ...]:
    """Return every shape that may be best in batches of any of these sizes, except plain decoding.

    Those are all widths and lengths with a known drafting cost: whole, and cut to a ladder of row
    counts and at cliffs. Each beam keeps room for a draft: a beam without a node only costs. A
    shape is left out if a larger one costs no more at either context: it would never be better.
    """
    widest = min(widest, WIDEST, max((w for w, *_ in costs.draft), default=0))
    longest = min(longest, max((n for _, n, _ in costs.draft), default=0))
    cuts = sorted({*_NODES, *costs.cliffs()})
    found = set()
    for width in range(1, widest + 1):
        for length in (n for n in LENGTHS if n <= longest):
            full = width * (length - 1) + 1
            for nodes in (full, *(n for n in cuts if max(length, full // 3) <= n < full)):
                if width < nodes <= costs.max_nodes:
                    found.add(BeamShape(width, length, nodes))
    shapes = sorted(found, key=lambda s: (s.nodes, s.length, s.width))
    cases = [(c, b) for c in (costs.short_context, costs.long_context) for b in batches]
    # In every column more is better: sizes, and costs with the sign reversed.
    sizes = np.array(
        [(s.width, s.length, s.nodes, *(-costs.step(s, c, b) for c, b in cases)) for s in shapes]
    ).reshape(-1, 3 + len(cases))
    no_worse = np.all(sizes[:, None] >= sizes[None], axis=2)  # [other, shape]
    np.fill_diagonal(no_worse, False)
    return tuple(s for s, beaten in zip(shapes, no_worse.any(axis=0), strict=True) if not beaten)
