"""Decode one sequence up to a number of tokens, and count the calls of a drafter's network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from constraints import Rules

from redrafter_mlx.config import BeamShape
from redrafter_mlx.decoding.cache.sequence_cache import SequenceCache
from redrafter_mlx.decoding.sequence import Policy
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.response import StepResult
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.model import Target


def run(
    decoder: Decoder,
    prompt: list[int],
    n: int,
    seed: int = 0,
    *,
    shapes: Policy | None = None,
    rules: Rules | None = None,
    cache: SequenceCache | None = None,
) -> tuple[list[int], list[StepResult]]:
    """Return the first `n` tokens, and the results of all steps.

    shapes: a policy that chooses the shape of each step, in place of the decoder's shape
    rules:  a constraint on the text, without a policy
    cache:  in which the text is decoded, a new one by default
    """
    emitted: list[int] = []

    def finished(result: StepResult) -> bool:
        emitted.extend(result.tokens)
        if rules is not None:
            for token in result.tokens:
                rules.advance(token)
        return len(emitted) >= n

    cache = cache or decoder.new_cache()
    keys = sequence_keys(seed)
    results = [*decode(decoder, cache, 0, prompt, keys, finished, rules, shapes)]
    return emitted[:n], results


def peak_of_decoding(decoder: Decoder, cache: SequenceCache, prompt: list[int], steps: int) -> int:
    """Return the most bytes that decoding takes in its steps from the fourth on."""
    mx.clear_cache()
    before, made = mx.get_active_memory(), 0

    def finished(_: StepResult) -> bool:
        nonlocal made
        made += 1
        if made == 3:
            mx.reset_peak_memory()
        return made == steps

    for _ in decode(decoder, cache, 0, prompt, sequence_keys(0), finished):
        pass
    return mx.get_peak_memory() - before


@contextmanager
def counted(owner: object, *methods: str) -> Iterator[list[int]]:
    """Return the query rows of every call of these methods, whose first argument is or begins with
    tokens [B, N].
    """
    calls: list[int] = []

    def counting(honest: Callable[..., object]) -> Callable[..., object]:
        def call(first: Any, *rest: object) -> object:
            tokens = first[0] if isinstance(first, tuple) else first
            calls.append(tokens.shape[1])
            return honest(first, *rest)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in methods:
            patch.setattr(owner, name, counting(getattr(owner, name)))
        yield calls


SHAPES = [
    BeamShape(*shape) for shape in ((1, 1), (1, 2), (1, 5), (2, 1), (2, 3), (3, 4), (4, 2), (4, 5))
]

READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__array__", "__index__")


@contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Count the reads of an array's values on the host, except for the buffer protocol's."""
    counts: Counter[str] = Counter()
    honest = {name: getattr(mx.array, name) for name in READS if hasattr(mx.array, name)}

    def counting(name: str, original: object) -> object:
        def read(*args: object, **kwargs: object) -> object:
            counts[name] += 1
            return original(*args, **kwargs)  # type: ignore[operator]

        return read

    evaluate = mx.eval
    try:
        for name, original in honest.items():
            setattr(mx.array, name, counting(name, original))
        mx.eval = counting("eval", evaluate)
        yield counts
    finally:
        for name, original in honest.items():
            setattr(mx.array, name, original)
        mx.eval = evaluate


PROMPT = [3, 5, 7]


def read(target: Target, prompts: list[list[int]]) -> TreeCache:
    """Return the cache of a batch of prompts, each of which is read alone."""
    caches = []
    for prompt in prompts:
        caches.append(target.new_cache())
        target.append(mx.array([prompt]), caches[-1], 0)
    return TreeCache.joined(caches)


def up_to(end: int, tokens: list[int]) -> list[int]:
    """Return the tokens until an answer ends."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens
