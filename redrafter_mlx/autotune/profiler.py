"""Measuring what a step costs on this machine, in seconds.

The target's call is timed on trees of every small row count, at a short and at a long context,
and drafting over beam shapes. Repeats are interleaved, so that a machine that becomes slower or
busier does so for all of them, and medians are taken. As in the decoding loop, several calls are
on their way at once, so that what a single call waits for the host is not counted.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from typing import NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.autotune.assumed import LONG_CONTEXT, SHORT_CONTEXT
from redrafter_mlx.autotune.cost_model import CostCurves, Setup
from redrafter_mlx.autotune.policy import WIDEST
from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.loop import Decoder
from redrafter_mlx.decoding.step_result import StepResult
from redrafter_mlx.drafting.interface import DraftInput, Proposer
from redrafter_mlx.runtime.blas import BLAS
from redrafter_mlx.runtime.device import chip_name
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.speculation.tree import Beams, TokenTree, pack_beam
from redrafter_mlx.target.kv_cache import TreeCache
from redrafter_mlx.target.model import Target

ROWS = (*range(1, 18), 20, 24, 28, 32)
LENGTHS = (2, 3, 5, 8)

BUDGET = 6.0
"""Seconds to repeat measurements in."""

_BURST = 0.02
"""Seconds of calls on their way at once, so far as they are short; and the most of them."""
_MOST_CALLS = 8

_MOST_ROUNDS = 9

_REST = 3, 5
"""Rounds, and steps in each, that tell what a step takes beyond its parts."""


class _Extent(NamedTuple):
    """How much is measured where a one-row call takes less than `below` seconds.

    long_rows: may be few, for what context adds comes from attention alone
    rounds:    how often everything is measured at least, after a call that compiles kernels;
               0: that call is the measurement
    """

    below: float
    rows: tuple[int, ...]
    long_rows: tuple[int, ...]
    lengths: tuple[int, ...]
    rounds: int


_EXTENTS = (
    _Extent(0.02, ROWS, ROWS, LENGTHS, 2),
    _Extent(0.15, ROWS, (1, 2, 4, 8, 9, 16, 32), LENGTHS, 2),
    _Extent(math.inf, (1, 2, 3, 4, 6, 8, 12, 16), (1, 16), (2, 8), 0),
)
"""Nobody waits minutes for an answer on a machine that is slow, or busy, already."""

Call = Callable[[], Sequence[mx.array]]

_Case = tuple[str, int, int]
"""What is measured: its kind, and rows or width and length."""


def setup_of(model: nn.Module, target: Target, drafter: nn.Module | None, name: str) -> Setup:
    """What curves hold for; `name` says what drafts, and `drafter` holds its tensors, if any."""
    tensors = "" if drafter is None else f" {_fingerprint(drafter)}"
    return Setup(
        chip=f"{mx.default_device().type.name} {chip_name()}",
        model=f"{target.model_type} {_fingerprint(model)}",
        drafter=name + tensors,
        dtype=str(target.dtype).rsplit(".", 1)[-1],
        mlx=metadata.version("mlx"),
        blas=BLAS.library or BLAS.note,
    )


def measure(
    target: Target,
    proposer: Proposer | None,
    setup: Setup,
    *,
    widest: int = WIDEST,
    budget: float = BUDGET,
    done: Callable[[float], None] | None = None,
) -> CostCurves:
    """The cost curves of this machine.

    Args:
      proposer: None where nothing drafts on the device
      widest: most candidates that it can give
      budget: seconds for repeats
      done: told the share that is finished, now and then
    """
    cases: dict[_Case, Call] = {}
    cache = target.new_cache()
    one_row = verification_call(target, cache, 1, SHORT_CONTEXT)
    seconds_of(target, one_row, 1)  # compiles kernels
    alone = [seconds_of(target, one_row, 1) for _ in range(2)]
    extent = next(e for e in _EXTENTS if min(alone) < e.below)
    for rows in extent.rows:
        cases["short", rows, 0] = verification_call(target, cache, rows, SHORT_CONTEXT)
    cache = target.new_cache()
    for rows in extent.long_rows:
        cases["long", rows, 0] = verification_call(target, cache, rows, LONG_CONTEXT)
    if proposer is not None:
        for width in range(1, min(widest, WIDEST) + 1):
            for length in extent.lengths:
                shape = BeamShape(width, length)
                cases["draft", width, length] = drafting_call(target, proposer, shape)
    with BLAS.threads_by_rows():
        taken = _interleaved(target, cases, extent.rounds, budget, done or (lambda _: None))
    taken["short", 1, 0] += alone
    repeats = [t for t in taken.values() if len(t) > 1]
    spread = statistics.median((max(t) - min(t)) / statistics.median(t) for t in repeats)
    times = {case: statistics.median(t) for case, t in taken.items()}
    curves = CostCurves(
        setup=setup,
        short_context=SHORT_CONTEXT,
        long_context=LONG_CONTEXT,
        short=tuple((r, s) for (kind, r, _), s in times.items() if kind == "short"),
        long=tuple((r, s) for (kind, r, _), s in times.items() if kind == "long"),
        draft=tuple((w, n, s) for (kind, w, n), s in times.items() if kind == "draft"),
        plain_rest=0.0,
        chain_rest=0.0,
        drafted_rest=0.0,
        spread=spread,
    )
    rounds, steps = _REST if extent.rounds else (1, 2)
    return _with_rest(curves, target, proposer, widest, rounds, steps)


def random_tree(rows: int, vocab: int) -> TokenTree:
    """A tree of `rows` nodes with random tokens that branches where it can; two are a chain."""
    if rows <= 2:
        tokens = mx.array([[[1 % vocab, 2 % vocab][:rows]]], mx.int32)
        return pack_beam(Beams(tokens, -mx.arange(rows, dtype=mx.float32)[None, None]), rows)
    W, L = 4, 2 + rows // 2
    tokens = mx.random.randint(0, vocab, (1, W, L), key=mx.random.key(rows))
    tokens = mx.where(mx.arange(L) == 0, tokens[:, :1, :1], tokens)
    # Four branches that share nothing but the root, however few tokens there are.
    tokens = mx.where(mx.arange(L) == 1, mx.arange(W)[None, :, None] % vocab, tokens)
    scores = -mx.broadcast_to(mx.arange(L).astype(mx.float32), (1, W, L))
    return pack_beam(Beams(tokens.astype(mx.int32), scores), rows)


def verification_call(target: Target, cache: TreeCache, rows: int, context: int) -> Call:
    """A call of the target on a tree of `rows` nodes behind `context` tokens, none of them real."""
    tree, length = random_tree(rows, target.vocab_size), mx.array([context])

    def call() -> Sequence[mx.array]:
        BLAS.prepare_for(rows)
        hidden, logits = target.verify(tree, cache, length, context)
        return [hidden, mx.argmax(logits, axis=-1), *cache.buffers]

    return call


def drafting_call(target: Target, proposer: Proposer, shape: BeamShape) -> Call:
    context = mx.random.normal((1, target.context_size), key=mx.random.key(0)).astype(target.dtype)
    root, position = mx.array([1 % target.vocab_size]), mx.array([SHORT_CONTEXT - 1])
    given = DraftInput(context, root, position)

    def call() -> Sequence[mx.array]:
        BLAS.prepare_for(shape.nodes)
        tree = pack_beam(proposer.propose(given, shape), shape.nodes)
        return [tree.tokens, tree.parents, tree.depths, tree.mask]

    return call


def _interleaved(
    target: Target,
    cases: dict[_Case, Call],
    least: int,
    budget: float,
    tell: Callable[[float], None],
) -> dict[_Case, list[float]]:
    """The seconds of each case, measured `least` times or as often as the budget allows."""
    taken: dict[_Case, list[float]] = {case: [] for case in cases}
    calls = {}
    for case, call in cases.items():
        cold = seconds_of(target, call, 1)
        once = seconds_of(target, call, 1) if least else cold
        calls[case] = _at_once(once)
        if calls[case] == 1 or not least:  # as good as any measurement to come
            taken[case].append(once)
        tell(len(calls) / len(cases) / 2)
    began = time.perf_counter()
    for done in range(1, _MOST_ROUNDS + 1 if least else 1):
        for case, call in cases.items():
            taken[case].append(seconds_of(target, call, calls[case]))
        spent = time.perf_counter() - began
        tell(0.5 + max(done / _MOST_ROUNDS, min(spent / budget, 1.0)) / 2)
        if min(map(len, taken.values())) >= least and spent * (done + 1) / done > budget:
            break
    return taken


def _with_rest(
    curves: CostCurves,
    target: Target,
    proposer: Proposer | None,
    widest: int,
    rounds: int,
    steps: int,
) -> CostCurves:
    """The curves with what a whole step of the loop takes beyond its parts.

    A step and its parts are measured in turn, and compared within each round: the rest is small,
    and the difference of times from different moments would be what the machine did meanwhile.
    Plain steps hold least and those of several beams most, whatever a noisy machine says.
    """
    shapes = [PLAIN]
    if proposer is not None:
        shapes += [BeamShape(1, 2), BeamShape(min(2, widest), 4)]
    cache = target.new_cache()
    parts: list[list[tuple[Call, int]]] = []
    for shape in shapes:
        rows = curves.plain_rows(SHORT_CONTEXT) if shape == PLAIN else shape.nodes
        calls = [verification_call(target, cache, rows, SHORT_CONTEXT)]
        if proposer is not None and shape != PLAIN:
            calls.append(drafting_call(target, proposer, shape))
        with BLAS.threads_by_rows():
            parts.append([(call, _at_once(seconds_of(target, call, 1))) for call in calls])
    found: list[list[float]] = [[] for _ in shapes]
    prompt = [(7 * i + 1) % target.vocab_size for i in range(SHORT_CONTEXT)]
    for _ in range(rounds):
        for shape, beside, rest in zip(shapes, parts, found, strict=True):
            decoder = Decoder(target, proposer, shape, SamplingParams(), curves.plain_rows)
            step = step_seconds(decoder, prompt, steps)
            with BLAS.threads_by_rows():
                rest.append(step - sum(_usual_seconds(target, *part) for part in beside))
    rests = [max(statistics.median(rest), 0.0) for rest in found]
    plain, chain, drafted = rests if proposer is not None else rests * 3
    chain = max(plain, chain)
    return replace(curves, plain_rest=plain, chain_rest=chain, drafted_rest=max(chain, drafted))


def step_seconds(
    decoder: Decoder,
    prompt: list[int],
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The median time of `steps` steps of the decoding loop behind a prompt."""
    read: list[float] = []

    def finished(_: StepResult) -> bool:
        read.append(clock())
        return len(read) == steps + 2  # the prompt, and a first step that compiles

    for _ in decoder.run(decoder.target.new_cache(), 0, prompt, sequence_keys(0), finished):
        pass
    return statistics.median(b - a for a, b in pairwise(read[1:]))


def _at_once(seconds: float) -> int:
    """How many calls of so many seconds are on their way together."""
    return max(1, min(_MOST_CALLS, int(_BURST / max(seconds, 1e-9))))


def _usual_seconds(target: Target, call: Call, times: int) -> float:
    """The median of three measurements."""
    return statistics.median(seconds_of(target, call, times) for _ in range(3))


def seconds_of(target: Target, call: Call, times: int) -> float:
    """Seconds of one of `times` calls on their way together."""
    with target.lock:
        mx.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            last = call()
            mx.async_eval(*last)
        mx.eval(*last)
        return (time.perf_counter() - began) / times


def _fingerprint(module: nn.Module) -> str:
    """SHA-256 of the names, shapes and types of a module's tensors: all that time depends on."""
    leaves = cast(list[tuple[str, mx.array]], nn.utils.tree_flatten(module.parameters()))
    lines = sorted(f"{name} {array.dtype} {array.shape}" for name, array in leaves)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
