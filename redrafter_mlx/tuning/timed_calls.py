"""The calls and steps that the profiler times, on made-up texts and trees."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from redrafter_mlx.config import BeamShape
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.interface import Drafter, Seen
from redrafter_mlx.response import StepResult
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.speculation.tree import TokenTree, pack_beam
from redrafter_mlx.target_model.kv_cache import TreeCache
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.timings import SHORT_CONTEXT

Call = Callable[[], Sequence[mx.array]]

_IN_A_ROW = 3
"""Number of steps in a row whose time is the measure of one."""


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


def drafting_call(target: Target, drafter: Drafter, shape: BeamShape) -> Call:
    """Return a call that drafts and packs one shape after a made-up text."""
    P, wanted = SHORT_CONTEXT, drafter.features
    C = target.context_size if wanted.any else 0
    features = mx.random.normal((1, P, C), key=mx.random.key(0)).astype(target.dtype)
    tokens = mx.ones((1, P + 1), mx.int32) % target.vocab_size
    memory = drafter.empty(1)
    last, one = mx.array([P - 1], mx.int32), mx.ones((1,), mx.int32)
    if wanted.every_position:
        text = Seen(tokens, features if C else None, last - last, last, P - 1, 0)
        memory = drafter.extend(memory, text)
        mx.eval(memory)
    seen = Seen(tokens[:, :2], features[:, :1] if C else None, last, one, P)

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


def step_seconds(decoder: Decoder) -> float:
    """Return the seconds of a step of the decoding loop: of several, the shortest few in a row.

    Single steps would not do: one that is read late makes the next one seem short.
    """
    prompt = [(7 * i + 1) % decoder.target.vocab_size for i in range(SHORT_CONTEXT)]
    read: list[float] = []

    def finished(_: StepResult) -> bool:
        read.append(time.perf_counter())
        return len(read) == 2 * _IN_A_ROW + 2  # the prompt, and a first step that compiles

    for _ in decode(decoder, decoder.new_cache(), 0, prompt, sequence_keys(0), finished):
        pass
    return min(b - a for a, b in zip(read[1:], read[1 + _IN_A_ROW :], strict=False)) / _IN_A_ROW
