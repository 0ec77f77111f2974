"""Graphs that are traced once for every size and replayed from then on.

An mlx-lm model builds its graph in Python, module by module, at every call, and so does a drafter.
Replaying a trace spares that and fuses elementwise operations; what is computed stays the same.

A trace holds the weights that were there when it was made, and MLX keeps traces by thread: when a
target is gone, a thread that called it, but not last, holds its weights until the thread ends.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

import mlx.core as mx

from redrafter_mlx.borrow import TargetRows
from redrafter_mlx.cache import TreeCache
from redrafter_mlx.config import BeamShape
from redrafter_mlx.layer_cache import LayerRows, TreePlan
from redrafter_mlx.proposer import DraftInput, Proposer, SamplingProposer
from redrafter_mlx.tree import Beams

_P = ParamSpec("_P")
_R = TypeVar("_R")

TreeCall = Callable[[mx.array, TreeCache, bool], tuple[mx.array, mx.array]]
"""tokens [B, N] of the tree that the cache is planned for -> hidden [B, N, C], logits [B, N, V].

The flag says whether to compile: a size that hardly comes again is built faster than compiled.
"""


def traced_call(
    backbone: Callable[..., mx.array], head: Callable[[mx.array], mx.array]
) -> TreeCall:
    """The backbone and the output layer behind it, as one call on a planned cache."""

    def build(
        tokens: mx.array,
        offset: mx.array,
        mask: mx.array,
        write_at: mx.array,
        gather: mx.array | None,
        sizes: tuple[int, int, bool],
        rows: Sequence[LayerRows],
    ) -> tuple[mx.array, mx.array, Sequence[LayerRows]]:
        cache = TreeCache.of(rows, TreePlan(offset, mask, write_at, gather, *sizes))
        hidden = backbone(tokens, cache=cache.layers)
        return hidden, head(hidden), cache.rows

    replay = _replayed(build)

    def call(tokens: mx.array, cache: TreeCache, compiled: bool) -> tuple[mx.array, mx.array]:
        if not compiled:
            hidden = backbone(tokens, cache=cache.layers)
            return hidden, head(hidden)
        plan = cache.plan
        assert isinstance(plan, TreePlan)
        sizes = (plan.extent, plan.capacity, plan.keep)
        hidden, logits, cache.rows = replay(
            tokens, plan.offset, plan.mask, plan.write_at, plan.gather, sizes, cache.rows
        )
        return hidden, logits

    return call


class TracedProposer:
    """A proposer whose drafts depend on what it is given and on nothing else, as a replayed trace.

    What it draws for rejection is built anew each time.
    """

    def __init__(self, proposer: Proposer) -> None:
        def build(
            context: mx.array,
            root: mx.array,
            position: mx.array,
            rows: tuple[tuple[tuple[mx.array, mx.array], ...], mx.array] | None,
            sizes: tuple[int, int],
        ) -> tuple[mx.array, mx.array, mx.array]:
            kept = None if rows is None else TargetRows(*rows)
            given = DraftInput(context, root, position, kept)
            beams = proposer.propose(given, BeamShape(*sizes))
            return beams.tokens, beams.log_probs, beams.goes_on_from

        self._proposer = proposer
        self._replay = _replayed(build)

    @property
    def reads_context(self) -> tuple[int, ...]:
        return self._proposer.reads_context

    @property
    def reads_layers(self) -> tuple[int, ...]:
        return self._proposer.reads_layers

    def propose(self, given: DraftInput, shape: BeamShape) -> Beams:
        return Beams(*self._replay(*given, (shape.width, shape.length)))


class TracedSamplingProposer(TracedProposer):
    """The same of a proposer that can draw."""

    def __init__(self, proposer: SamplingProposer) -> None:
        super().__init__(proposer)
        self.draw = proposer.draw


def traced_proposer(proposer: Proposer) -> Proposer:
    if isinstance(proposer, SamplingProposer):
        return TracedSamplingProposer(proposer)
    return TracedProposer(proposer)


def _replayed(build: Callable[_P, _R]) -> Callable[_P, _R]:
    """`build`, traced once for all that it is given but the values of arrays.

    MLX finds traces by a function's address and may keep those of one that is gone. A number of
    its own, given with every call, keeps them from answering for the next function there.
    """

    def numbered(_: int, *given: _P.args, **named: _P.kwargs) -> _R:
        return build(*given, **named)

    return partial(mx.compile(numbered), secrets.randbits(62))
