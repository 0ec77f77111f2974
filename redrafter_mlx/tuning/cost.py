"""Cost model: seconds of a step by query rows, by context length and by beam shape.

Kernels change at certain row counts: one more row can cost nothing, or double a call. So a row
count between two measured ones costs as much as the upper one. Until they are measured, costs are
assumed, roughly, as ratios of a one-row call; what steps take corrects them, see `corrections`.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import metadata
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from redrafter_mlx.config import BeamShape
from redrafter_mlx.cpu.blas import BLAS
from redrafter_mlx.drafting.interface import LEVEL_COST
from redrafter_mlx.runtime.device import chip_name, dtype_name, system_name
from redrafter_mlx.runtime.processes.launched import launch_name
from redrafter_mlx.target_model.fingerprint import shapes_hash
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.version import __version__

SHORT_CONTEXT, LONG_CONTEXT = 128, 2048
"""Committed tokens at which calls are timed; attention is linear between and beyond them."""

FEW_ROWS = (1, 2, 3, 4, 6, 8, 10, 13, 16, 20, 24, 28, 32)
_CALL = {
    # Two threads of an AMD EPYC with MKL or OpenBLAS, float32: products of 2 to 16 rows.
    "cpu": (1.0, 1.0, 1.5, 1.55, 1.75, 1.9, 2.1, 2.3, 2.5, 2.8, 3.0, 3.3, 3.6),
    # The authors of arXiv 2403.09919 on an M1 Max and an M2 Ultra, float16: 2 to 15 drafted nodes
    # cost as much as 1.5 to 2.2 plain steps, 16 as much as 2.7 to 3.3.
    "apple": (1.0, 1.3, 1.35, 1.4, 1.5, 1.7, 1.8, 2.0, 2.8, 3.2, 3.6, 4.1, 4.5),
    # Weights are read once for all of these rows.
    "cuda": (1.0, 1.02, 1.03, 1.04, 1.06, 1.1, 1.12, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4),
}
"""Assumed cost of a call of FEW_ROWS query rows, as a multiple of a one-row call; a drafter's level
with as many beams costs as much more than one with one beam. More rows in one tree are neither
assumed nor measured."""

WIDEST, LENGTHS = 4, (2, 3, 4, 5, 6, 8)
"""Maximum width, and the lengths, of shapes that are chosen automatically."""

Array = NDArray[np.float64]
Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Setup:
    """The models and the machine that were measured; times are reused only if all fields are equal.

    chip:    the device's name
    model:   fingerprint of the target's tensors: names, shapes and types
    drafter: the same of the drafter, or its kind if it has no tensors
    dtype:   type of the target's hidden states, and the bits of quantised keys and values
    mlx:     MLX's version
    others:  the system, and the versions of mlx-lm and this package
    blas:    the library of matrix products on a CPU
    launch:  how ranks share the target, see `launch_name`
    """

    chip: str
    model: str
    drafter: str
    dtype: str
    mlx: str
    blas: str
    launch: str = ""
    others: str = ""

    @property
    def key(self) -> str:
        """The name of the files about it."""
        fields = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(fields.encode()).hexdigest()[:32]


def setup_of(model: nn.Module, target: Target, drafter: str) -> Setup:
    """Return the setup that times hold for; `drafter` is equal for drafters with equal times."""
    bits = "" if target.packing is None else f", {target.packing.label}"
    return Setup(
        chip=f"{mx.default_device().type.name} {chip_name()}",
        model=f"{target.model_type} {shapes_hash(model)}",
        drafter=drafter,
        dtype=dtype_name(target.dtype) + bits,
        mlx=metadata.version("mlx"),
        blas=BLAS.library or BLAS.note,
        launch=launch_name(),
        others=f"{system_name()}, mlx-lm {metadata.version('mlx-lm')}, {__version__}",
    )


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step's parts; the rest of a step is left to `corrections`.

    short_context, long_context: committed tokens of the two curves
    short, long:    pairs of query rows and seconds of the target's call, from one row on
    draft:          triples of beams, length and seconds of drafting and packing; more beams than
                    the drafter's maximum width are those of a batch
    spread:         typical relative difference of two measurements of one case
    assumed:        whether nothing is measured; seconds are then in units of a one-row call
    """

    setup: Setup
    short_context: int
    long_context: int
    short: Curve
    long: Curve
    draft: tuple[tuple[int, int, float], ...]
    spread: float
    assumed: bool = False

    @property
    def max_nodes(self) -> int:
        """Maximum number of nodes of one sequence's tree."""
        return min(self.short[-1][0], FEW_ROWS[-1])

    def verify(self, nodes: int, context: float, batch: int = 1) -> float:
        """Return the seconds of the target's call on `batch` trees after at most `context` tokens.

        Matrix products take as long as those of one tree with as many nodes. Attention reads as
        many tokens for each batch row as for the longest.
        """
        longer = float(np.interp(nodes, *self._longer))
        share = (batch * context - self.short_context) / (self.long_context - self.short_context)
        return _at(self.short, batch * nodes) + longer * max(share, 0.0)

    def drafting(self, width: int, length: int, batch: int = 1) -> float:
        """Return the seconds of drafting and packing `width` beams of `length` tokens for each row.

        A number of beams that was not measured costs as much as the next larger one; lengths are
        interpolated linearly, from 0 at length 1 on, and cost in proportion after the last one.
        """
        if length == 1 or not self.draft:
            return 0.0  # without a drafter, continuations are found on the host
        beams = width * batch
        w = min([w for w in self._drafting if w >= beams], default=max(self._drafting))
        lengths, seconds = zip(*self._drafting[w], strict=True)
        more = max(1.0, (length - 1) / (lengths[-1] - 1))
        return float(np.interp(length, lengths, seconds)) * more * max(1.0, beams / w)

    def step(self, shape: BeamShape, context: float, batch: int = 1) -> float:
        """Return the seconds of a whole step; length 1 is plain decoding."""
        called = self.verify(shape.nodes, context, batch)
        return called + self.drafting(shape.width, shape.length, batch)

    def steps(self, shapes: Iterable[BeamShape], context: int, batch: int) -> Array:
        """Return [S], the seconds of steps of some shapes."""
        return np.array([self.step(shape, context, batch) for shape in shapes])

    def cliffs(self) -> dict[int, float]:
        """Return row counts of a tree after which one more costs over twice the usual, or noise.

        Each maps to the relative rise of the call's time at the short context.
        """
        of_trees = [pair for pair in self.short if pair[0] <= self.max_nodes]
        jumps = {r: after / before - 1 for (r, before), (_, after) in pairwise(of_trees)}
        usual = max(self.spread, statistics.median(jumps.values() or [0.0]))
        return {rows: jump for rows, jump in jumps.items() if jump > 2 * usual}

    @cached_property
    def _longer(self) -> tuple[list[int], list[float]]:
        """Rows, and seconds that the long context adds to a call with so many, never negative."""
        extra = [max(seconds - _at(self.short, rows), 0.0) for rows, seconds in self.long]
        return [rows for rows, _ in self.long], extra

    @cached_property
    def _drafting(self) -> dict[int, list[tuple[int, float]]]:
        """Pairs of length and seconds by number of beams, both rising."""
        lines: dict[int, list[tuple[int, float]]] = {}
        for beams, length, seconds in sorted(self.draft):
            lines.setdefault(beams, [(1, 0.0)]).append((length, seconds))
        return lines

    @classmethod
    def from_record(cls, setup: Setup, record: Mapping[str, Any]) -> CostModel:
        """Read costs that `asdict` wrote; raises an exception for other fields."""
        cases = {name: tuple(map(tuple, record[name])) for name in ("short", "long", "draft")}
        return cls(**{**record, **cases, "setup": setup})


def assumed_costs(
    setup: Setup, backend: str, widest: int, level_cost: float = LEVEL_COST, block_cost: float = 0.0
) -> CostModel:
    """Return the costs that are assumed until they are measured.

    Args:
      backend: "cpu", "apple" or "cuda"; another one is treated as "cuda"
      widest: maximum number of the drafter's beams, 0 without a drafter
      level_cost: cost of the drafter's level with one beam, as a share of a one-row call
      block_cost: cost of what it computes once for a tree, as such a share
    """
    calls = dict(zip(FEW_ROWS, _CALL.get(backend, _CALL["cuda"]), strict=True))
    call = tuple(calls.items())
    draft = [
        (w, n, block_cost * calls[1] + level_cost * calls[w] * (n - 1))
        for w in range(1, widest + 1)
        for n in LENGTHS
    ]
    contexts = SHORT_CONTEXT, LONG_CONTEXT
    return CostModel(setup, *contexts, call, call, tuple(draft), 0.0, assumed=True)


def candidates(
    costs: CostModel,
    widest: int = WIDEST,
    longest: int = LENGTHS[-1],
    batches: Sequence[int] = (1,),
) -> tuple[BeamShape, ...]:
    """Return every shape that may be best in batches of any of these sizes, except plain decoding.

    Those are all widths and lengths with a known drafting cost: whole, and cut to a ladder of row
    counts and at cliffs, with room for a draft in each beam. A shape is left out if a larger one
    costs no more at either context.
    """
    widest = min(widest, WIDEST, max((w for w, *_ in costs.draft), default=0))
    longest = min(longest, max((n for _, n, _ in costs.draft), default=0))
    cuts = {*FEW_ROWS[4:], *costs.cliffs()}
    shapes = [
        BeamShape(width, length, nodes)
        for length in LENGTHS
        for width in range(1, widest + 1)
        for full in [width * (length - 1) + 1]
        for nodes in {full, *[n for n in cuts if max(length, full // 3) <= n < full]}
        if length <= longest and width < nodes <= costs.max_nodes
    ]
    shapes.sort(key=lambda s: (s.nodes, s.length, s.width))
    cases = [(c, b) for c in (costs.short_context, costs.long_context) for b in batches]
    # In every column more is better: sizes, and costs with the sign reversed.
    sizes = np.array(
        [(s.width, s.length, s.nodes, *(-costs.step(s, c, b) for c, b in cases)) for s in shapes]
    ).reshape(-1, 3 + len(cases))
    no_worse = np.all(sizes[:, None] >= sizes, axis=2).sum(axis=0)  # each itself included
    return tuple([s for s, count in zip(shapes, no_worse, strict=True) if count == 1])


def _at(curve: Sequence[tuple[int, float]], rows: int) -> float:
    """Return the seconds of the next measured row count; proportional to rows after the last."""
    measured, seconds = curve[min(bisect_left(curve, (rows,)), len(curve) - 1)]
    return seconds * max(1.0, rows / measured)
