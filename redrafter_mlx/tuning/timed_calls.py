"""The calls that the profiler times, on made-up texts and trees."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.interface import Drafter, Seen
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.tree import TokenTree, pack_beam
from redrafter_mlx.target_model.kv_cache import TreeCache
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.timings import SHORT_CONTEXT

Call = Callable[[], Sequence[mx.array]]

_BURST, _MOST_CALLS = 0.02, 8
"""Seconds of short calls that are submitted at once, and their maximum number."""


def random_tree(rows: int, vocab: int) -> TokenTree:
    """Return a tree of `rows` random tokens that branches where it can; two nodes are a chain."""
    if rows <= 2:
        tokens = mx.array([[[1 % vocab, 2 % vocab][:rows]]], mx.int32)
        return pack_beam(Beams(tokens, -mx.arange(rows, dtype=mx.float32)[None, None]), rows)
    W, L = 4, 2 + rows // 2
    tokens = mx.random.randint(0, vocab, (1, W, L), key=mx.random.key(rows))
    tokens = mx.where(mx.arange(L) == 0, tokens[:, :1, :1], tokens)
    # Four branches that share nothing but the root, even with a small vocabulary.
    tokens = mx.where(mx.arange(L) == 1, mx.arange(W)[None, :, None] % vocab, tokens)
    scores = -mx.broadcast_to(mx.arange(L).astype(mx.float32), (1, W, L))
    return pack_beam(Beams(tokens.astype(mx.int32), scores), rows)


def verification_call(target: Target, cache: TreeCache, rows: int, context: int) -> Call:
    """Return the target's call on a tree of `rows` nodes after `context` tokens, all made up."""
    tree, length = random_tree(rows, target.vocab_size), mx.array([context])

    def call() -> Sequence[mx.array]:
        hidden, logits = target.verify(tree, cache, length, context)
        return [hidden, mx.argmax(logits, axis=-1), *cache.buffers]

    return call


def drafting_call(target: Target, drafter: Drafter, shape: BeamShape, batch: int = 1) -> Call:
    """Return a call that drafts and packs one shape after made-up texts of SHORT_CONTEXT tokens."""
    B, P, wanted = batch, SHORT_CONTEXT, drafter.features
    C = target.context_size if wanted.any else 0
    features = mx.random.normal((B, P, C), key=mx.random.key(0)).astype(target.dtype)
    tokens = mx.ones((B, P + 1), mx.int32) % target.vocab_size
    memory = drafter.empty(B)
    if wanted.every_position:
        zero, count = mx.zeros((B,), mx.int32), mx.full((B,), P - 1, mx.int32)
        text = Seen(tokens, features if C else None, zero, count, P - 1, 0)
        memory = drafter.extend(memory, text)
        mx.eval(memory)
    newest = features[:, :1] if C else None
    last, one = mx.full((B,), P - 1, mx.int32), mx.ones((B,), mx.int32)
    seen = Seen(tokens[:, :2], newest, last, one, P)

    def call() -> Sequence[mx.array]:
        nonlocal memory
        beams, memory = drafter.draft(memory, seen, shape)
        tree = pack_beam(beams, shape.nodes)
        return [tree.tokens, tree.parents, tree.depths, tree.mask]

    return call


def seconds_of(target: Target, call: Call, times: int) -> float:
    """Return the seconds per call of `times` calls that are submitted together."""
    with target.lock:
        mx.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            last = call()
            mx.async_eval(*last)
        mx.eval(*last)
        return (time.perf_counter() - began) / times


def next_seconds(target: Target, call: Call) -> float:
    """Return the seconds of a call that follows one like it, the mean of several short ones."""
    first = seconds_of(target, call, 1)
    return seconds_of(target, call, max(1, min(_MOST_CALLS, int(_BURST / max(first, 1e-9)))))
