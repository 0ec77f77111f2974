"""The KV cache: it holds a tree of drafts during verification, and commits one path of the tree.

Every array operation here is lazy: lengths live on the device, and the host knows only an upper
bound of them. A step writes each buffer before attention reads it: the path that the previous step
accepted, then the new tree. MLX updates a buffer in place only if nothing in flight still reads it.
A write after attention, to move the path to its slots at once, would copy every buffer in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from redrafter_mlx.runtime.device import backend
from redrafter_mlx.speculation.constants import iota
from redrafter_mlx.speculation.tree import TokenTree
from redrafter_mlx.target_model.cache_slots import round_up
from redrafter_mlx.target_model.layer_cache import (
    Committed,
    LayerBuffers,
    LayerCache,
    LayerPlan,
    Pending,
    PromptSpan,
    TreePlan,
)
from redrafter_mlx.target_model.masks import attention_mask, chain_mask
from redrafter_mlx.target_model.recurrent.interface import AcceptedPath, TreeNodes
from redrafter_mlx.target_model.recurrent.state_cache import Recurrences, StateCache, States

CAPACITY_STEP = 256
"""Buffers grow in steps of this many slots, so that they are rarely copied."""

SPARE_STEP = 32
"""Copies of a cache, which nothing may be appended to for long, end at a multiple of this many
slots."""

EXTENT_STEPS = {"cpu": 64, "apple": CAPACITY_STEP, "cuda": 128}
"""Attention reads the buffers up to the bound of the length, rounded up to a multiple of this many
slots, or in long texts by up to an eighth: each extent needs its own compiled graph. A CPU computes
attention over 32 slots too many for half a millisecond a row, and compiles a graph for some 40;
with hundreds too many it would take longer. A GPU hardly notices them (Metal's kernel for few query
rows reads no masked slot), and waits while the host builds."""


@dataclass(frozen=True)
class Snapshot:
    """The cache's references to arrays at one moment."""

    layer_buffers: Sequence[LayerBuffers]
    pending: Pending | None


class TreeCache:
    """The caches of all layers of a target, for a batch of sequences.

    states:    of the layers that keep a recurrent state, by index
    windows:   sizes of the sliding windows of layers that attend to no more, by index
    attention: the layers that keep keys and values
    recurrent: those that keep a recurrent state
    has_checkpoints: whether `shared` takes states of an earlier position
    """

    has_checkpoints = True

    def __init__(
        self,
        n_layers: int,
        states: Mapping[int, Recurrences] | None = None,
        windows: Mapping[int, int] | None = None,
    ) -> None:
        self.states, self.windows = states or {}, windows or {}
        self.layers = [
            StateCache(self.states[i]) if i in self.states else LayerCache(self.windows.get(i))
            for i in range(n_layers)
        ]
        self.attention = [layer for layer in self.layers if isinstance(layer, LayerCache)]
        self.recurrent = [layer for layer in self.layers if isinstance(layer, StateCache)]
        self.plan: LayerPlan | None = None
        self.pending: Pending | None = None

    @property
    def layer_buffers(self) -> Sequence[LayerBuffers]:
        """The buffers of every layer."""
        return [layer.buffers for layer in self.layers]

    @layer_buffers.setter
    def layer_buffers(self, given: Sequence[LayerBuffers]) -> None:
        for layer, buffers in zip(self.layers, given, strict=True):
            layer.buffers = buffers

    @property
    def masked_windows(self) -> set[int]:
        """Sizes of the sliding windows that calls asked masks for."""
        return set().union(*(layer.windows for layer in self.attention))

    def plan_call(self, plan: LayerPlan) -> None:
        """Set the plan of the next call, and grow the buffers for it.

        Within a compiled call they would take a graph of its own, for one step in 256 slots.
        """
        self.plan, offset = plan, plan.offset
        for layer in self.layers:
            layer.plan, layer.offset = plan, offset
        for state in self.recurrent:
            state.begin(plan)
        if 0 < self.capacity < plan.capacity:
            for attention in self.attention:
                attention.grow(plan.capacity)

    def plan_prompt(self, start: int, count: int, length: int = 0) -> None:
        """Plan a call that appends `count` prompt tokens at slot `start`.

        length: of the whole prompt; its first call grows the buffers for all of it, and for the
                first token after it
        """
        assert self.pending is None, "flush() first"
        end = start + count
        capacity = planned_capacity(max(length, end), 1)
        self.plan_call(PromptSpan(start, mx.array([start]), end, capacity))

    def plan_tree(self, tree: TokenTree, length: mx.array, bound: int) -> None:
        """Plan a call that verifies `tree` after the committed `length` [B], at most `bound`."""
        N = tree.tokens.shape[1]
        extent = extent_of(bound + N)
        if tree.is_chain:
            offset, mask = length, chain_mask(length, N, extent)
        else:
            offset, mask = length[:, None] + tree.depths, attention_mask(tree.mask, length, extent)
        nodes = None
        if self.states and N > 1:
            nodes = TreeNodes(tree.mask, tree.depths, tree.max_depth, tree.is_chain)
        self._plan_nodes(offset, mask, length, self._moves, not tree.is_chain, nodes)

    def plan_level(self, mask: mx.array, depth: int, length: mx.array, bound: int) -> None:
        """Plan a call that appends W nodes of one depth to a tree of M - W nodes after the text.

        Shapes:
          mask:   [B, W, M] bool, True = may attend; the new nodes come last
          length: [B] int32, committed, at most `bound`; the position of nodes of depth 0
        """
        B, W, M = mask.shape
        attended = attention_mask(mask, length, extent_of(bound + M))
        offset = mx.broadcast_to(length[:, None] + depth, (B, W))
        self._plan_nodes(offset, attended, length + (M - W))

    def plan_forks(self, positions: mx.array, ahead: int, length: int) -> None:
        """Plan a call that appends one token to each of N forks of a text of `length` tokens.

        A fork starts at its position [N] int32 in the text and already has `ahead` tokens. It sees
        the text before that position and its own tokens. The slots after the text hold one token of
        each fork in turn.

        With positions 1 and 3 in a text of 4, ahead 1:

            text      forks
            1 0 0 0   1 0 1 0
            1 1 1 0   0 1 0 1
        """
        assert self.pending is None, "flush() first"
        N = positions.shape[0]
        extent = length + (ahead + 1) * N
        column = iota(extent)[None]
        own = (column - length) % N == iota(N)[:, None]
        mask = mx.where(column < length, column < positions[:, None], own)
        self._plan_nodes(
            (positions + ahead)[None], mask[None, None], mx.array([length + ahead * N])
        )

    def _plan_nodes(
        self,
        offset: mx.array,
        mask: mx.array,
        first: mx.array,
        moves: mx.array | None = None,
        keep: bool = False,
        nodes: TreeNodes | None = None,
    ) -> None:
        """Plan a call on nodes in slots that follow one another.

        Shapes:
          mask:  [B, 1, N, extent] bool
          first: [B] int32, the first node's slot
        """
        B, _, N, extent = mask.shape
        assert nodes is not None or N == 1 or not self.states, "recurrences need whole trees"
        if B == 1:
            mask = mask[0, 0]  # all mlx-lm attention broadcasts a mask without batch axes
        slots = (first[:, None] + iota(N))[:, None, :, None]
        capacity = round_up(extent, CAPACITY_STEP)
        accepted = self._accepted
        plan = TreePlan(offset, mask, slots, moves, extent, capacity, keep, nodes, accepted)
        self.plan_call(plan)

    def commit(
        self, tree: TokenTree, path: mx.array, n_accepted: mx.array, length: mx.array
    ) -> mx.array:
        """Commit the accepted path of `tree`; return the new length [B].

        A chain's nodes are in their slots. A tree's path is moved to its slots, and any path's
        recurrent state is computed, by the next step's call, or by `flush`.
        """
        done = tree.tokens.shape[1] == 1 if self.states else tree.is_chain
        self.pending = None if done else Pending(path, n_accepted, length)
        return length + 1 + n_accepted

    def committed(self, layers: Sequence[int], length: mx.array, bound: int) -> Committed:
        """Return the keys and values of the first `length` [B] positions, at most `bound`.

        A pending path is read where it is, among the last tree's nodes: to move it first would
        copy every buffer. As a reader still holds them, the next call copies those of `layers`.
        """
        given, pending = [self.layers[i] for i in layers], self.pending
        pairs = [layer for layer in given if isinstance(layer, LayerCache)]
        assert len(pairs) == len(given), "recurrent states have no keys"
        nodes = None if pending is None else pairs[0].tree_keys
        extent = min(extent_of(bound), self.capacity)
        slots = mx.broadcast_to(iota(extent), (length.shape[0], extent))
        if pending is None or nodes is None:
            positions = mx.where(slots < length[:, None], slots, -1)
        else:
            before = mx.where(slots < pending.length[:, None], slots, -1)
            positions = mx.concatenate([before, pending.positions(nodes.shape[2])], axis=1)
        read = [layer.committed(extent, nodes is not None) for layer in pairs]
        keys, values = zip(*read, strict=True)
        return Committed(keys, values, positions)

    def flush(self) -> None:
        """Commit a pending path now: then slots below the length, and states, are valid."""
        moves, accepted = self._moves, self._accepted
        if moves is not None:
            for layer in self.attention:
                layer.move(moves)
        if accepted is not None:
            for state in self.recurrent:
                state.commit(accepted)
        self.pending = None

    def take(self, index: mx.array, slots: int | None = None) -> TreeCache:
        """Return a copy of the cache with the batch rows at `index`, of the first slots or all."""
        self.flush()
        return self._holding([layer.take(index, slots) for layer in self.layers])

    @classmethod
    def joined(cls, caches: Sequence[TreeCache]) -> TreeCache:
        """Join the batch rows of several caches that are not empty into one batch."""
        for cache in caches:
            cache.flush()
        layers = zip(*(cache.layers for cache in caches), strict=True)
        return caches[0]._holding([first.joined(others) for first, *others in layers])

    def shared(self, slots: int, states: States | None = None) -> TreeCache:
        """Return the first slots of a flushed cache; the first write copies them, and no others.

        states: after these slots; None if they are those of the whole cache
        """
        assert self.pending is None, "flush() first"
        cache = self._holding([layer.shared(slots) for layer in self.layers])
        for layer, those in zip(cache.recurrent, states or (), strict=states is not None):
            layer.states = [*those]
        return cache

    def current_states(self) -> States:
        """Return the states of a flushed cache after its last position."""
        assert self.pending is None, "flush() first"
        held = [[a for a in layer.states if a is not None] for layer in self.recurrent]
        return tuple(map(tuple, held))

    def end_at(self, length: mx.array, most: Sequence[int]) -> mx.array:
        """Let pending paths end at these lengths, if they are longer; return the lengths [B].

        The tree's root is always kept. Without a pending path, all lengths are as they are.

        length: [B] int32, committed, pending paths included
        """
        if self.pending is None:
            return length
        roots = self.pending.length + 1
        n_accepted = mx.clip(mx.array([*most], mx.int32) - roots, 0, self.pending.n_accepted)
        self.pending = replace(self.pending, n_accepted=n_accepted)
        return roots + n_accepted

    def _holding(self, buffers: Sequence[LayerBuffers]) -> TreeCache:
        cache = TreeCache(len(self.layers), self.states, self.windows)
        cache.layer_buffers = buffers
        return cache

    def trim(self, slots: int) -> None:
        """Flush, and keep only the first slots, computed, with little spare capacity after them.

        Layer by layer: the buffers of one are freed before those of the next are copied. Buffers
        of the right size are not copied.
        """
        self.flush()
        kept = round_up(slots, SPARE_STEP)
        for layer in self.layers:
            if layer.used:
                layer.trim(kept)
                mx.eval(layer.arrays)
                mx.clear_cache()  # MLX would hold on to the freed buffers

    def trimmed_size(self, slots: int) -> tuple[int, int]:
        """Return the bytes and the number of the buffers that `trim` leaves; computes nothing."""
        kept = round_up(slots, SPARE_STEP)
        count = sum(2 for layer in self.attention if layer.used)
        count += sum(len(layer.states) for layer in self.recurrent)
        return sum(layer.trimmed_bytes(kept) for layer in self.layers), count

    def snapshot(self) -> Snapshot:
        """Return the state to restore if a step is built but not submitted.

        Drop it before submitting: a buffer with two references is copied in full when written.
        """
        return Snapshot(self.layer_buffers, self.pending)

    def restore(self, before: Snapshot) -> None:
        """Undo a step that was built but not submitted."""
        self.layer_buffers, self.pending = before.layer_buffers, before.pending

    @property
    def buffers(self) -> list[mx.array]:
        """All arrays that hold state, for evaluation."""
        of_states = [a for state in self.recurrent for a in state.arrays]
        held = [a for layer in self.attention for a in layer.buffers]
        return [a for a in held if isinstance(a, mx.array)] + of_states

    @property
    def capacity(self) -> int:
        """T, the number of slots of each sequence."""
        return self.attention[0].capacity if self.attention else 0

    @property
    def _moves(self) -> mx.array | None:
        """The slots of the last tree's nodes; None if no path is pending, or it is in its slots."""
        nodes = self.attention[0].tree_keys if self.attention else None
        return None if self.pending is None or nodes is None else self.pending.moves(nodes.shape[2])

    @property
    def _accepted(self) -> AcceptedPath | None:
        """The pending path of recurrent states."""
        pending = self.pending if self.states else None
        return None if pending is None else AcceptedPath(pending.path, pending.n_accepted)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.buffers)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states, which do not grow with the text."""
        return sum(a.nbytes for layer in self.recurrent for a in layer.arrays)


def planned_capacity(length: int, nodes: int) -> int:
    """Return the capacity that a tree of `nodes` nodes after `length` positions needs."""
    return round_up(extent_of(length + nodes), CAPACITY_STEP)


def extent_of(slots: int) -> int:
    """Return the number of slots that attention reads of the first `slots`; see EXTENT_STEPS."""
    return round_up(slots, max(EXTENT_STEPS[backend()], (1 << slots.bit_length()) >> 4))
