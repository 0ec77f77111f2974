"""Static trees: drafts along a fixed list of rank paths, regardless of their scores.

Medusa (arXiv 2401.10774, section 2.1.2) and EAGLE-1 (arXiv 2401.15077) choose a tree once, from the
accuracy of each rank at each depth, and draft along it at every step:

    paths                                tree
    (0,), (1,), (0, 0), (0, 1)           root -+- likeliest -+- likeliest after that
                                               |             `- second after that
                                               `- second

Beam search chooses the nodes anew at each step, by the scores of their paths.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx

from redrafter_mlx.checks import check_int
from redrafter_mlx.config import MAX_BEAM_LENGTH, MAX_BEAM_WIDTH, BeamShape, GenerationOptions
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.speculation.beam_search import Kept, Levels, draft_log_probs, search, top_k
from redrafter_mlx.speculation.beams import Beams

RankPath = tuple[int, ...]


@dataclass(frozen=True)
class StaticTree:
    """Paths of ranks from the root: (0, 2) is the third likeliest token after the likeliest one.

    name: for display; None without one
    """

    paths: tuple[RankPath, ...]
    name: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Raise BadInputError, naming the path, for a list that is not a tree."""
        for path in self.paths:
            check_int("depth of a static tree", len(path), 1, MAX_BEAM_LENGTH - 1)
            for rank in path:
                check_int("rank of a static tree", rank, 0, MAX_BEAM_WIDTH - 1)
        known = {()} | {*self.paths}
        if len(known) != len(self.paths) + 1 or not self.paths:
            raise BadInputError("a static tree needs paths, each of them once")
        for path in self.paths:
            if path[:-1] not in known:
                raise BadInputError(f"the path {list(path)} needs {list(path[:-1])} in the tree")
        widest = max(Counter(map(len, self.paths)).values())
        check_int("width of a static tree", widest, 1, MAX_BEAM_WIDTH)

    @property
    def depth(self) -> int:
        """Number of drafts in the longest path."""
        return max(map(len, self.paths))

    @property
    def max_ranks(self) -> int:
        """Maximum number of ranked tokens needed after a node."""
        return max(path[-1] for path in self.paths) + 1

    def level(self, depth: int) -> list[RankPath]:
        """Return the sorted paths of one depth; the root's path is empty."""
        return sorted(path for path in self.paths if len(path) == depth) if depth else [()]

    def extended(self, depth: int) -> list[RankPath]:
        """Return the sorted paths of one depth that have children."""
        return sorted({path[:-1] for path in self.paths if len(path) == depth + 1})

    @cached_property
    def shape(self) -> BeamShape:
        """The beam shape: W nodes at the widest depth, L = depth + 1, and the number of nodes."""
        widest = max(len(self.level(depth)) for depth in range(1, self.depth + 1))
        return BeamShape(widest, self.depth + 1, len(self.paths) + 1)

    def shape_for(self, options: GenerationOptions) -> BeamShape:
        """Return `shape`; raise BadInputError for options that ask for another shape."""
        for name, asked, own in (
            ("beam_width", options.beam_width, self.shape.width),
            ("beam_length", options.beam_length, self.shape.length),
            ("max_nodes", options.max_nodes, self.shape.nodes),
        ):
            if asked not in (None, own):
                raise BadInputError(f"{name} is {asked}; it is {own} in {self}")
        return self.shape

    def __str__(self) -> str:
        name = "a static tree" if self.name is None else f"the static tree {self.name}"
        return f"{name} of {len(self.paths)} drafts, {self.depth} deep"


def static_tree(levels: Levels, root: mx.array, tree: StaticTree) -> Beams:
    """Draft along the tree's paths after the root [B]; only nodes with children are extended.

    Returns:
      Beams of the tree's shape: at each length, the nodes sorted by path, then padding
    """

    def in_every_row(index: list[int]) -> mx.array:
        return mx.broadcast_to(mx.array(index, mx.int32), (root.shape[0], len(index)))

    def ranked(level: int, logits: mx.array, above: mx.array) -> Kept:
        B, _, V = logits.shape
        here, extended = tree.level(level), tree.extended(level - 1)
        ranks = max(path[-1] for path in here) + 1
        best, index = top_k(draft_log_probs(logits).reshape(-1, V), ranks)
        after = [extended.index(path[:-1]) for path in here]
        chosen = in_every_row([i * ranks + path[-1] for i, path in zip(after, here, strict=True)])
        origins = in_every_row(after)
        step = mx.take_along_axis(best.reshape(B, -1), chosen, axis=1)
        return Kept(
            origins=origins,
            outputs=mx.take_along_axis(index.reshape(B, -1), chosen, axis=1),
            scores=mx.take_along_axis(above, origins, axis=1) + step,
            extended=in_every_row([here.index(path) for path in tree.extended(level)]),
        )

    return search(levels, root, tree.shape, ranked)
