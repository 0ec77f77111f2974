"""The time of each part of a step, found by adding one part after another.

A step is run in five variants: verification alone, then with acceptance, with commit, with
drafting, with packing, which is the whole step. A part costs what the step takes longer with it
than without it. Each variant is one graph with one evaluation at its end; the graphs of the timed
runs are not touched. All variants have the same shapes and the same bound of the length, so that
attention reads equally much.

Building a graph takes the host's time and is measured apart from evaluating it. The loop builds the
next step while the device works on this one; here they follow each other. So the loop itself is
timed in turn with the variants, after the same prompt.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from redrafter_mlx.autotune.profiler import step_seconds
from redrafter_mlx.bench.measure.methods import Clock
from redrafter_mlx.bench.statistics import Spread
from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.loop import Decoder
from redrafter_mlx.drafting.interface import DraftInput, Proposer
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.runtime.blas import BLAS
from redrafter_mlx.runtime.wired_memory import WIRED_MEMORY
from redrafter_mlx.speculation.accept import accept
from redrafter_mlx.speculation.tree import TokenTree, pack_beam
from redrafter_mlx.target.kv_cache import TreeCache
from redrafter_mlx.target.model import Target

PARTS = ("verification", "acceptance", "commit", "drafting", "packing")
"""In the order in which they are added."""

Evaluate = Callable[[Sequence[mx.array]], None]


@dataclass(frozen=True)
class Part:
    """One part's seconds a step; `low` and `high` are the least and the most of all rounds."""

    name: str
    device: Spread
    host: Spread


@dataclass(frozen=True)
class Breakdown:
    """A greedy step of one shape, part by part.

    drafter:      which of several, see Method
    query_rows:   of the target's call: nodes and padding
    device, host: of the whole step
    loop:         seconds of a step in the decoding loop, where host and device overlap
    """

    dtype: str
    beam_width: int
    beam_length: int
    query_rows: int
    parts: tuple[Part, ...]
    device: Spread
    host: Spread
    loop: Spread
    drafter: str | None = None

    @property
    def beside_the_call(self) -> float:
        """Share of the loop's time that is not the target's call.

        The drafter's own products are in it, so what neither model's arithmetic takes is less.
        """
        return 1 - self.parts[0].device.median / self.loop.median


def break_down(
    redrafter: Redrafter,
    prompt: list[int],
    shape: BeamShape,
    *,
    dtype: str = "",
    rounds: int = 5,
    steps: int = 8,
    drafter: str | None = None,
    clock: Clock = time.perf_counter,
    evaluate: Evaluate = mx.eval,
) -> Breakdown:
    """Measure the parts of a greedy step after `prompt`.

    Variants take turns, round by round, so that a machine that drifts drifts for all. The drafts
    of some variants do not fit the text: with static shapes that changes no cost.

    Args:
      shape: with a length of at least 2; a step that drafts nothing has no such parts
      steps: of each variant in each round; the first one, which copies the cache, is not counted
    """
    assert redrafter.proposer is not None
    assert shape.length > 1
    target = redrafter.target
    bound = len(prompt) + (steps + 1) * shape.length
    decoder = Decoder(target, redrafter.proposer, shape, SamplingParams())
    built: list[list[float]] = [[] for _ in PARTS]
    evaluated: list[list[float]] = [[] for _ in PARTS]
    loop: list[float] = []
    with WIRED_MEMORY.held(redrafter.model), BLAS.threads_by_rows():
        with target.lock:
            start = _start(target, redrafter.proposer, prompt, shape)
        before = start.cache.snapshot()
        for turn in range(rounds):
            loop.append(step_seconds(decoder, prompt, steps, clock))
            with target.lock:
                BLAS.prepare_for(shape.nodes)
                for level in range(len(PARTS)):
                    i = (level + turn) % len(PARTS)
                    start.cache.restore(before)
                    step = _Step(target, redrafter.proposer, shape, bound, i)
                    times = _times(step, start, steps + 1, clock, evaluate)[1:]
                    built[i].append(statistics.median(b for b, _ in times))
                    evaluated[i].append(statistics.median(e for _, e in times))
    parts = tuple(
        Part(name, _difference(evaluated, i), _difference(built, i)) for i, name in enumerate(PARTS)
    )
    return Breakdown(
        dtype=dtype,
        beam_width=shape.width,
        beam_length=shape.length,
        query_rows=shape.nodes,
        parts=parts,
        device=_range(evaluated[-1]),
        host=_range(built[-1]),
        loop=_range(loop),
        drafter=drafter,
    )


@dataclass(frozen=True)
class _State:
    """What goes from step to step; shapes as in DecodeState."""

    cache: TreeCache
    length: mx.array
    tree: TokenTree


@dataclass(frozen=True)
class _Step:
    """A step with the first `last + 1` of PARTS."""

    target: Target
    proposer: Proposer
    shape: BeamShape
    bound: int
    last: int

    def __call__(self, state: _State) -> tuple[_State, list[mx.array]]:
        """The next state and all that has to be evaluated."""
        tree, cache, length = state.tree, state.cache, state.length
        hidden, logits = self.target.verify(tree, cache, length, self.bound)
        if self.last == 0:
            return state, [hidden, logits]
        accepted = accept(tree, mx.argmax(logits, axis=-1).astype(mx.int32))
        made = [accepted.n_accepted, accepted.emitted, accepted.path, accepted.bonus]
        if self.last == 1:
            return state, made
        length = cache.commit(tree, accepted.path, accepted.n_accepted, length)
        if self.last == 2:
            return replace(state, length=length), [*made, length]
        context = mx.take_along_axis(hidden, accepted.last[:, None, None], axis=1)[:, 0]
        given = DraftInput(context, accepted.bonus, length)
        beams = self.proposer.propose(given, self.shape)
        if self.last == 3:
            return _State(cache, length, tree), [*made, length, beams.tokens, beams.log_probs]
        tree = pack_beam(beams, self.shape.nodes)
        return _State(cache, length, tree), [*made, length, *_arrays(tree)]


def _start(target: Target, proposer: Proposer, prompt: list[int], shape: BeamShape) -> _State:
    """The state after the prompt, its first tree drafted."""
    cache = target.new_cache()
    context = target.prefill(mx.array([prompt], mx.int32), cache, 0, [len(prompt) - 1])
    root = mx.argmax(target.logits(context[:, None])[:, 0], axis=-1).astype(mx.int32)
    length = mx.array([len(prompt)], mx.int32)
    given = DraftInput(context, root, length)
    tree = pack_beam(proposer.propose(given, shape), shape.nodes)
    mx.eval(_arrays(tree), length, cache.buffers)
    return _State(cache, length, tree)


def _arrays(tree: TokenTree) -> list[mx.array]:
    return [held for held in tree if isinstance(held, mx.array)]


def _times(
    step: _Step, state: _State, steps: int, clock: Clock, evaluate: Evaluate
) -> list[tuple[float, float]]:
    """Seconds of building and of evaluating each of so many steps."""
    times = []
    for _ in range(steps):
        began = clock()
        state, outputs = step(state)
        built = clock()
        evaluate([*outputs, *state.cache.buffers])
        times.append((built - began, clock() - built))
    return times


def _difference(times: list[list[float]], i: int) -> Spread:
    """What variant i takes more than the one before it, round by round."""
    if i == 0:
        return _range(times[0])
    return _range([a - b for a, b in zip(times[i], times[i - 1], strict=True)])


def _range(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))
