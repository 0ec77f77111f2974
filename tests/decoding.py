"""Decode one sequence up to a number of tokens, and count the calls of a drafter's network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from constraints import Rules

from redrafter_mlx.decoding.proposal import Policy
from redrafter_mlx.decoding.sequence_cache import SequenceCache
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.response import StepResult
from redrafter_mlx.speculation.sampling import sequence_keys


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
