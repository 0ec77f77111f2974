"""The KV cache: it holds a tree of drafts during verification, and commits one path of the tree.

Every array operation here is lazy: lengths live on the device, and the host knows only an upper
bound of them. A step writes each buffer before attention reads it: the path that the previous step
accepted, then the new tree. MLX updates a buffer in place only if nothing in flight still reads it.
A write after attention, to move the path to its slots at once, would copy every buffer in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from redrafter_mlx.speculation.tree import TokenTree
from redrafter_mlx.target_model.cache.layer_cache import LayerBuffers, LayerCache
from redrafter_mlx.target_model.cache.layers import CacheLayers
from redrafter_mlx.target_model.cache.plans import (
    MAX_EXCESS,
    RING_SLACK,
    LayerPlan,
    PromptSpan,
    fork_plan,
    in_place,
    level_plan,
    tree_plan,
)
from redrafter_mlx.target_model.cache.slots import (
    SPARE_STEP,
    Committed,
    Pending,
    extent_of,
    planned_capacity,
    round_up,
)
from redrafter_mlx.target_model.recurrent.interface import AcceptedPath
from redrafter_mlx.target_model.recurrent.state_cache import States


@dataclass(frozen=True)
class Snapshot:
    """The cache's references to arrays at one moment."""

    layer_buffers: Sequence[LayerBuffers]
    pending: Pending | None


class TreeCache(CacheLayers):
    """The caches of all layers of a target, for a batch of sequences; see CacheLayers.

    excess: upper bound of the number of slots after the committed text that were written
    has_checkpoints: whether `shared` takes states of an earlier position
    """

    has_checkpoints = True
    plan: LayerPlan | None = None
    pending: Pending | None = None
    excess: int = 0

    def plan_call(self, plan: LayerPlan) -> None:
        """Set the plan of the next call, and grow the buffers for it.

        Within a compiled call they would take a graph of its own, for one step in 256 slots.
        """
        self.plan, offset = plan, plan.offset
        for layer in self.layers:
            layer.plan, layer.offset = plan, offset
        for state in self.recurrent:
            state.begin(plan)
        capacity = plan.capacity
        for kind in self.kinds:  # without a call for each: this is part of every step
            held, slots = kind.buffers[0], capacity if kind.ring is None else kind.ring
            if isinstance(held, mx.array) and held.shape[2] < min(capacity, slots):
                for attention in self.attention:
                    attention.grow(capacity)
                break

    def plan_prompt(self, start: int, count: int, length: int = 0) -> None:
        """Plan a call that appends `count` prompt tokens at slot `start`.

        length: of the whole prompt; its first call grows the buffers for all of it, and for the
                first token after it
        """
        assert self.pending is None, "flush() first"
        end = start + count
        capacity = planned_capacity(max(length, end), 1)
        self.plan_call(PromptSpan(start, mx.array([start]), end, capacity))
        self.excess = max(self.excess - count, 0)

    def plan_tree(self, tree: TokenTree, length: mx.array, bound: int) -> None:
        """Plan a call that verifies `tree` after the committed `length` [B], at most `bound`."""
        before, rings = (self._moves, self._accepted), [*self.rings]
        self.plan_call(tree_plan(tree, length, bound, *before, rings, bool(self.states)))
        N = tree.tokens.shape[1]
        self.excess = max(self.excess, N if N <= RING_SLACK else 1)

    def plan_level(self, mask: mx.array, depth: int, length: mx.array, bound: int) -> None:
        """Plan a call that appends W nodes of one depth to a tree of M - W nodes after the text.

        Shapes:
          mask:   [B, W, M] bool, True = may attend; the new nodes come last
          length: [B] int32, committed, at most `bound`; the position of nodes of depth 0
        """
        assert mask.shape[1] == 1 or not self.states, "recurrences need whole trees"
        assert not self.rings, "windows need whole trees"
        self.plan_call(level_plan(mask, depth, length, bound, self._moves, self._accepted))

    def plan_forks(self, positions: mx.array, ahead: int, length: int) -> None:
        """Plan a call that appends one token to each of N forks of a text; see `fork_plan`."""
        assert self.pending is None, "flush() first"
        assert not self.forgetful, "the text is needed as it was at each fork"
        self.plan_call(fork_plan(positions, ahead, length))

    def commit(
        self, tree: TokenTree, path: mx.array, n_accepted: mx.array, length: mx.array
    ) -> mx.array:
        """Commit the accepted path of `tree`; return the new length [B].

        A chain's nodes are in their slots. A tree's path is moved to its slots, and any path's
        recurrent state is computed, by the next step's call, or by `flush`.
        """
        done = tree.tokens.shape[1] == 1 if self.states else in_place(tree, bool(self.rings))
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
        nodes = [] if pending is None else pairs[0].tree_nodes
        of_nodes = []
        if pending is not None and nodes:
            length, of_nodes = pending.length, [pending.positions(nodes[0].shape[2])]
        extents = [min(extent_of(bound), layer.capacity) for layer in pairs]
        each = [*zip(pairs, extents, strict=True)]
        slots = {(layer.ring, n): layer.positions(length, n) for layer, n in each}
        read = [layer.committed(n, bool(of_nodes)) for layer, n in each]
        keys, values = zip(*read, strict=True)
        positions = [mx.concatenate([slots[layer.ring, n], *of_nodes], axis=1) for layer, n in each]
        return Committed(keys, values, tuple(positions))

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
        return self._holding([layer.take(index, slots) for layer in self.layers], self.excess)

    @classmethod
    def joined(cls, caches: Sequence[TreeCache]) -> TreeCache:
        """Join the batch rows of several caches that are not empty into one batch."""
        for cache in caches:
            cache.flush()
        layers = zip(*(cache.layers for cache in caches), strict=True)
        joined = [first.joined(others) for first, *others in layers]
        return caches[0]._holding(joined, max(cache.excess for cache in caches))

    def shared(self, slots: int, states: States | None = None, dropped: int = 0) -> TreeCache:
        """Return the first slots of a flushed cache; the first write copies them, and no others.

        states:  of forgetful layers after these slots; None if they are those of the whole cache
        dropped: number of committed positions after these slots
        """
        assert self.pending is None, "flush() first"
        excess = self.excess + dropped if states is None else MAX_EXCESS
        cache = self._holding([layer.shared(slots) for layer in self.layers], excess)
        for layer, those in zip(cache.forgetful, states or (), strict=states is not None):
            layer.state = those
        return cache

    def reaches_back(self, length: int, known: int) -> bool:
        """Whether a text of `length` positions that is read can be cut to its first `known`.

        Of the windows there must be every position, as trees have written after the text.
        """
        if known == length or not self.forgetful:
            return True
        wraps = any(length + self.excess > slots for slots in self.rings.values())
        return not self.states and (not wraps or self.excess + length - known <= MAX_EXCESS)

    def current_states(self) -> States:
        """Return the states of a flushed cache's forgetful layers after its last position."""
        assert self.pending is None, "flush() first"
        return tuple(layer.state for layer in self.forgetful)

    def end_at(self, length: mx.array, max_lengths: Sequence[int]) -> mx.array:
        """Let pending paths end at these lengths, if they are longer; return the lengths [B].

        The tree's root is always kept. Without a pending path, all lengths are as they are.

        length: [B] int32, committed, pending paths included
        """
        if self.pending is None:
            return length
        roots = self.pending.length + 1
        n_accepted = mx.clip(mx.array([*max_lengths], mx.int32) - roots, 0, self.pending.n_accepted)
        self.pending = replace(self.pending, n_accepted=n_accepted)
        return roots + n_accepted

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

    def snapshot(self) -> Snapshot:
        """Return the state to restore if a step is built but not submitted.

        Drop it before submitting: a buffer with two references is copied in full when written.
        """
        return Snapshot(self.layer_buffers, self.pending)

    def restore(self, before: Snapshot) -> None:
        """Undo a step that was built but not submitted."""
        self.layer_buffers, self.pending = before.layer_buffers, before.pending

    def _holding(self, buffers: Sequence[LayerBuffers], excess: int) -> TreeCache:
        cache = TreeCache(
            len(self.layers), self.states, self.windows, whole=self.whole, packing=self.packing
        )
        cache.layer_buffers, cache.excess = buffers, excess
        return cache

    @property
    def _moves(self) -> mx.array | None:
        """The slots of the last tree's nodes; None if no path is pending, or it is in its slots."""
        if self.pending is None or not self.attention:
            return None
        first = self.attention[0]
        nodes = first.buffers[first.n_arrays]  # without a call: this is part of every step
        return self.pending.moves(nodes.shape[2]) if isinstance(nodes, mx.array) else None

    @property
    def _accepted(self) -> AcceptedPath | None:
        """The pending path of recurrent states."""
        pending = self.pending if self.states else None
        return None if pending is None else AcceptedPath(pending.path, pending.n_accepted)
