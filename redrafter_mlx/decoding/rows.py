"""Operations on batch rows: take some, join several, pad trees to one size."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from redrafter_mlx.decoding.copies import CopyPlan, copy_beams, tree_of_copies
from redrafter_mlx.decoding.sequence_cache import SequenceCache
from redrafter_mlx.decoding.state import DecodeState, Drafts, RowDrafts
from redrafter_mlx.speculation.tree import Beams, TokenTree


def take_states(state: DecodeState, rows: Sequence[int]) -> DecodeState:
    """Return some of the rows; the cache is a copy unless all rows are taken."""
    if list(rows) == list(range(len(state.options))):
        return state
    index = mx.array(list(rows))
    return DecodeState(
        state.cache.take(rows),
        state.length[index],
        take_drafts(state.drafts, rows),
        state.keys[index],
        tuple(state.options[b] for b in rows),
        tuple(state.history[b] for b in rows),
    )


def join_states(states: Sequence[DecodeState]) -> DecodeState:
    """Join the rows of several states into one batch; their drafters must have caught up."""
    if len(states) == 1:
        return states[0]
    return DecodeState(
        SequenceCache.joined([state.cache for state in states]),
        mx.concatenate([state.length for state in states]),
        join_drafts([state.drafts for state in states]),
        mx.concatenate([state.keys for state in states]),
        sum((state.options for state in states), ()),
        sum((state.history for state in states), ()),
    )


def with_copies(drafts: Drafts, plans: Sequence[CopyPlan | None], roots: Sequence[int]) -> Drafts:
    """Return drafts in which copies of the text replace or join what was drafted.

    plans: one per row, None to leave the row as it is
    roots: the last token of each row
    """
    rows = []
    for b, (plan, root) in enumerate(zip(plans, roots, strict=True)):
        mine = take_drafts(drafts, [b])
        if plan is not None:
            copies = copy_beams([plan.copies], [root], plan.shape)
            tree, copied = tree_of_copies(copies, plan.shape, mine.beams if plan.joined else None)
            mine = Drafts(tree, (RowDrafts(plan.shape, copied=True),), copied=copied)
        rows.append(mine)
    return join_drafts(rows)


def take_tree(tree: TokenTree, rows: slice | mx.array) -> TokenTree:
    """Return the trees of some rows."""
    return tree._replace(
        tokens=tree.tokens[rows],
        parents=tree.parents[rows],
        depths=tree.depths[rows],
        beams=tree.beams[rows],
        mask=tree.mask[rows],
    )


def take_drafts(drafts: Drafts, rows: Sequence[int]) -> Drafts:
    """Return the drafts of some rows."""
    if len(rows) == len(drafts.rows):
        return drafts
    index, beams = mx.array(list(rows)), drafts.beams
    if beams is not None:
        parents = None if beams.parents is None else beams.parents[index]
        beams = Beams(beams.tokens[index], beams.log_probs[index], parents)
    return Drafts(
        take_tree(drafts.tree, index),
        tuple(drafts.rows[b] for b in rows),
        None if drafts.log_probs is None else drafts.log_probs[index],
        beams,
        None if drafts.copied is None else drafts.copied[index],
    )


def join_drafts(parts: Sequence[Drafts]) -> Drafts:
    """Join the drafts of several batches, padded to the size of the largest tree.

    No copies can join the result: its beams are not kept.
    """
    if len(parts) == 1:
        return parts[0]
    tree = join_trees([part.tree for part in parts])
    N = tree.tokens.shape[1]
    return Drafts(
        tree,
        sum((part.rows for part in parts), ()),
        _joined([part.log_probs for part in parts], parts, N),
        None,
        _joined([part.copied for part in parts], parts, N),
    )


def join_trees(trees: Sequence[TokenTree]) -> TokenTree:
    """Join the trees of several batches; the smaller ones are padded."""
    N = max(tree.tokens.shape[1] for tree in trees)
    padded = [_padded(tree, N) for tree in trees]
    return TokenTree(
        mx.concatenate([tree.tokens for tree in padded]),
        mx.concatenate([tree.parents for tree in padded]),
        mx.concatenate([tree.depths for tree in padded]),
        mx.concatenate([tree.beams for tree in padded]),
        mx.concatenate([tree.mask for tree in padded]),
        max(tree.max_depth for tree in trees),
        all(tree.is_chain for tree in trees),
    )


def _padded(tree: TokenTree, nodes: int) -> TokenTree:
    """Return the tree padded to `nodes` nodes; padding attends to itself alone."""
    more = nodes - tree.tokens.shape[1]
    if not more:
        return tree
    after = [(0, 0), (0, more)]
    itself = mx.eye(nodes, dtype=mx.bool_) & (mx.arange(nodes) >= nodes - more)
    return tree._replace(
        tokens=mx.pad(tree.tokens, after),
        parents=mx.pad(tree.parents, after, constant_values=-1),
        depths=mx.pad(tree.depths, after),
        beams=mx.pad(tree.beams, after),
        mask=mx.pad(tree.mask, [*after, (0, more)]) | itself,
    )


def _joined(
    arrays: Sequence[mx.array | None], parts: Sequence[Drafts], nodes: int
) -> mx.array | None:
    """Join arrays [B, N, ...] of several drafts; zeros replace missing ones, None if all are."""
    known = next((array for array in arrays if array is not None), None)
    if known is None:
        return None
    filled = []
    for array, part in zip(arrays, parts, strict=True):
        if array is None:
            filled.append(mx.zeros((len(part.rows), nodes, *known.shape[2:]), known.dtype))
        else:
            tail = [(0, 0)] * (array.ndim - 2)
            filled.append(mx.pad(array, [(0, 0), (0, nodes - array.shape[1]), *tail]))
    return mx.concatenate(filled)
