"""Operations on batch rows: take some, join several, pad trees to one size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import mlx.core as mx

from redrafter_mlx.decoding.copies import copy_beams, tree_of_copies
from redrafter_mlx.decoding.proposal import Drafted, Proposal
from redrafter_mlx.decoding.sequence_cache import SequenceCache
from redrafter_mlx.decoding.state import DecodeState, Drafts
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.speculation.tree import TokenTree


def take_states(
    state: DecodeState, rows: Sequence[int], slots: int, drafter: Drafter | None
) -> DecodeState:
    """Return some of the rows; the cache is a copy unless all rows are taken.

    slots, drafter: as in `SequenceCache.take`
    """
    if list(rows) == list(range(len(state.options))):
        return state
    index = mx.array(list(rows))
    return DecodeState(
        state.cache.take(rows, slots, drafter),
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


def with_copies(drafts: Drafts, plans: Sequence[Proposal | None], roots: Sequence[int]) -> Drafts:
    """Return drafts in which copies of the text replace or join what was drafted.

    plans: one per row, None to leave the row as it is
    roots: the last token of each row
    """
    parts = []
    # Rows without a plan stay together: each part takes some thirty operations.
    for planned, some in groupby(range(len(plans)), lambda b: None if plans[b] is None else b):
        mine = take_drafts(drafts, [*some])
        plan = None if planned is None else plans[planned]
        if planned is not None and plan is not None:
            copies = copy_beams([plan.continuations], [roots[planned]], plan.shape)
            tree, from_host = tree_of_copies(copies, plan.shape, mine.beams if plan.join else None)
            mine = Drafts(tree, (Drafted(plan.shape, from_host=True),), from_host=from_host)
        parts.append(mine)
    return join_drafts(parts)


def take_drafts(drafts: Drafts, rows: Sequence[int]) -> Drafts:
    """Return the drafts of some rows."""
    if len(rows) == len(drafts.rows):
        return drafts
    index, beams = mx.array(list(rows)), drafts.beams
    if beams is not None:
        beams = beams.take(index)
    return Drafts(
        drafts.tree.take(index),
        tuple(drafts.rows[b] for b in rows),
        None if drafts.log_probs is None else drafts.log_probs[index],
        beams,
        None if drafts.from_host is None else drafts.from_host[index],
        None if drafts.noise is None else drafts.noise[index],
    )


def join_drafts(parts: Sequence[Drafts]) -> Drafts:
    """Join the drafts of several batches, padded to the size of the largest tree.

    No copies can join the result: its beams are not kept. Nor is the noise, which is drawn again.
    """
    if len(parts) == 1:
        return parts[0]
    tree = TokenTree.joined([part.tree for part in parts])
    N = tree.tokens.shape[1]
    return Drafts(
        tree,
        sum((part.rows for part in parts), ()),
        _joined([part.log_probs for part in parts], parts, N),
        None,
        _joined([part.from_host for part in parts], parts, N),
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
