"""What a call does to the caches of all layers: the slots that it writes, and those it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import mlx.core as mx

from redrafter_mlx.speculation.constants import iota
from redrafter_mlx.speculation.tree import TokenTree
from redrafter_mlx.target_model.cache.slots import (
    CAPACITY_STEP,
    attention_mask,
    chain_mask,
    extent_of,
    ring_mask,
    round_up,
    windowed,
)
from redrafter_mlx.target_model.recurrent.interface import AcceptedPath, TreeNodes

RING_SLACK = 64
"""Slots of a ring beyond its window. The nodes of a tree take as many at most; larger trees, which
are rare, are kept apart from the ring. A text can be cut by so many tokens, less the nodes."""

MAX_EXCESS = RING_SLACK + 1
"""Maximum number of slots after a text that may have been written where a ring still holds its
window: the position before the window's first is not needed."""


def ring_size(window: int) -> int:
    """Return R, the number of slots of a layer that keeps a sliding window."""
    return window + RING_SLACK


class PromptSpan(NamedTuple):
    """A run of prompt tokens in slots that the host knows; slices and mask as in mlx-lm's KVCache.

    offset:   the first slot, which is its rotary position
    at:       [1] int32, the same on the device
    extent:   number of slots up to the last token
    capacity: slots that the buffers have after the call
    """

    offset: int
    at: mx.array
    extent: int
    capacity: int

    def first(self, window: int | None) -> int:
        """Return the first slot that attention reads."""
        return 0 if window is None else max(0, self.offset - window + 1)


class SlotPlan(NamedTuple):
    """Which slots of a layer one tree's keys and values go to, and what its nodes attend to.

    Shapes:
      mask:  [B, 1, N, extent] bool, [N, extent] if B = 1; True = may attend
      slots: [B, 1, N, 1] int32, the slot of each node
      moves: [B, 1, M, 1] int32, the slot of each node of the previous tree; None if the accepted
             ones are already in their slots

    extent:   number of slots that attention reads
    capacity: slots that the buffers have after the call
    apart:    whether attention reads the nodes after these slots, to which they are not written:
              they are too many for a ring
    """

    mask: mx.array
    slots: mx.array
    moves: mx.array | None
    extent: int
    capacity: int
    apart: bool = False

    @property
    def arrays(self) -> SlotArrays:
        return self.mask, self.slots, self.moves

    @property
    def sizes(self) -> SlotSizes:
        return self.extent, self.capacity, self.apart

    def in_ring(self, window: int, tree: TokenTree, length: mx.array, bound: int) -> SlotPlan:
        """Return the plan of a layer with a sliding window, where position p is in slot p % R.

        This is the plan of layers that keep all positions.

        length: [B] int32, committed, at most `bound`
        """
        N, R = tree.tokens.shape[1], ring_size(window)
        apart = N > RING_SLACK
        extent, capacity = min(self.extent, R), min(self.capacity, R)
        mask, slots, moves = self.arrays
        if apart or extent < self.extent or bound + N > window:
            ours = tree.mask if tree.max_depth < window else windowed(tree.mask, window)
            mask = ring_mask(ours, tree.depths, length, window, R, extent, apart=apart)
            mask = mask[0, 0] if length.shape[0] == 1 else mask
        if bound + N > R:
            slots, moves = slots % R, None if moves is None else moves % R
        return SlotPlan(mask, slots, moves, extent, capacity, apart)


class TreePlan(NamedTuple):
    """A call on the nodes of trees.

    Shapes:
      offset: [B] for a chain, else [B, N] int32: rotary positions

    whole: of the layers that keep all positions
    keep:  whether the next step may have to move this tree's path to its slots
    nodes: the same trees for recurrences; None for single tokens
    accepted: the path of the previous tree that recurrent states are committed to; None if they are
    rings: of the layers that keep a sliding window, by its size; none if they keep all positions
    """

    offset: mx.array
    whole: SlotPlan
    keep: bool
    nodes: TreeNodes | None = None
    accepted: AcceptedPath | None = None
    rings: Mapping[int, SlotPlan] = {}

    @property
    def extent(self) -> int:
        return self.whole.extent

    @property
    def capacity(self) -> int:
        return self.whole.capacity

    def of_window(self, window: int | None) -> SlotPlan:
        """Return the plan of a layer with this window; None if it has none."""
        return self.whole if window is None else self.rings.get(window, self.whole)

    def split(self) -> tuple[PlanArrays, PlanSizes]:
        """Return the arrays, and what is fixed in a compiled call; see `of`."""
        nodes, accepted = self.nodes, self.accepted
        of_nodes = None if nodes is None else nodes.arrays
        of_path = None if accepted is None else accepted.arrays
        slots = [self.whole, *self.rings.values()]
        of_slots, sizes = zip(*[(each.arrays, each.sizes) for each in slots], strict=True)
        form = (0, False) if nodes is None else (nodes.max_depth, nodes.is_chain)
        arrays = (self.offset, of_slots, of_nodes, of_path)
        return arrays, (sizes, tuple(self.rings), self.keep, *form)

    @classmethod
    def of(cls, arrays: PlanArrays, sizes: PlanSizes) -> TreePlan:
        """Return the plan that was split."""
        offset, of_slots, of_nodes, of_path = arrays
        slot_sizes, windows, keep, max_depth, is_chain = sizes
        nodes = None if of_nodes is None else TreeNodes(*of_nodes, max_depth, is_chain)
        accepted = None if of_path is None else AcceptedPath(*of_path)
        each = zip(of_slots, slot_sizes, strict=True)
        whole, *rings = [SlotPlan(*those, *numbers) for those, numbers in each]
        return cls(offset, whole, keep, nodes, accepted, dict(zip(windows, rings, strict=True)))


SlotArrays: TypeAlias = "tuple[mx.array, mx.array, mx.array | None]"
SlotSizes: TypeAlias = "tuple[int, int, bool]"
_Pair: TypeAlias = "tuple[mx.array, mx.array]"
PlanArrays: TypeAlias = "tuple[mx.array, tuple[SlotArrays, ...], _Pair | None, _Pair | None]"
PlanSizes: TypeAlias = "tuple[tuple[SlotSizes, ...], tuple[int, ...], bool, int, bool]"
LayerPlan: TypeAlias = "PromptSpan | TreePlan"


def in_place(tree: TokenTree, rings: bool) -> bool:
    """Whether any path of the tree that may be accepted is in its slots already.

    rings: whether some layers keep a window, to which large trees are not written
    """
    return tree.is_chain and not (rings and tree.tokens.shape[1] > RING_SLACK)


def tree_plan(
    tree: TokenTree,
    length: mx.array,
    bound: int,
    moves: mx.array | None,
    accepted: AcceptedPath | None,
    windows: Sequence[int],
    recurrent: bool,
) -> TreePlan:
    """Return the plan of a call on `tree` after the committed `length` [B], at most `bound`.

    moves, accepted: of the path that is pending
    windows:         sizes of those that layers keep in rings
    recurrent:       whether layers keep a recurrent state
    """
    N = tree.tokens.shape[1]
    extent = extent_of(bound + N)
    if tree.is_chain:
        offset, mask = length, chain_mask(length, N, extent)
    else:
        offset, mask = length[:, None] + tree.depths, attention_mask(tree.mask, length, extent)
    nodes = None
    if recurrent and N > 1:
        nodes = TreeNodes(tree.mask, tree.depths, tree.max_depth, tree.is_chain)
    whole = _slot_plan(mask, length, moves)
    rings = {}
    for size in windows:
        rings[size] = whole.in_ring(size, tree, length, bound)
    keep = not in_place(tree, bool(windows))
    return TreePlan(offset, whole, keep, nodes, accepted, rings)


def level_plan(
    mask: mx.array,
    depth: int,
    length: mx.array,
    bound: int,
    moves: mx.array | None,
    accepted: AcceptedPath | None,
) -> TreePlan:
    """Return the plan of `TreeCache.plan_level`; moves, accepted: of the path that is pending."""
    B, W, M = mask.shape
    attended = attention_mask(mask, length, extent_of(bound + M))
    offset = mx.broadcast_to(length[:, None] + depth, (B, W))
    whole = _slot_plan(attended, length + (M - W), moves)
    return TreePlan(offset, whole, keep=False, accepted=accepted)


def fork_plan(positions: mx.array, ahead: int, length: int) -> TreePlan:
    """Plan a call that appends one token to each of N forks of a text of `length` tokens.

    A fork starts at its position [N] int32 in the text and already has `ahead` tokens. It sees
    the text before that position and its own tokens. The slots after the text hold one token of
    each fork in turn.

    With positions 1 and 3 in a text of 4, ahead 1:

        text      forks
        1 0 0 0   1 0 1 0
        1 1 1 0   0 1 0 1
    """
    N = positions.shape[0]
    extent = length + (ahead + 1) * N
    column = iota(extent)[None]
    own = (column - length) % N == iota(N)[:, None]
    mask = mx.where(column < length, column < positions[:, None], own)
    whole = _slot_plan(mask[None, None], mx.array([length + ahead * N]), None)
    return TreePlan((positions + ahead)[None], whole, keep=False)


def _slot_plan(mask: mx.array, first: mx.array, moves: mx.array | None) -> SlotPlan:
    """Plan nodes in slots that follow one another.

    Shapes:
      mask:  [B, 1, N, extent] bool
      first: [B] int32, the first node's slot
    """
    B, _, N, extent = mask.shape
    if B == 1:
        mask = mask[0, 0]  # all mlx-lm attention broadcasts a mask without batch axes
    slots = (first[:, None] + iota(N))[:, None, :, None]
    return SlotPlan(mask, slots, moves, extent, round_up(extent, CAPACITY_STEP))
