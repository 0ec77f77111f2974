"""An engine of a tiny model, its calls counted, its memory limited, its parts made to fail."""

from __future__ import annotations

import gc
import threading
from collections import abc
from collections.abc import Callable, Generator

import mlx.core as mx
import mlx.nn as nn
from tiny import byte_tokenizer, random_drafter

from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.memory import MemoryBudget
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.response import Response

PROMPTS = [[i, i + 1, i + 2] for i in range(6)]
LONG = [(7 * i + 3) % 256 for i in range(400)]
ENDLESS = 10**5
"""Tokens of an answer that still runs when the test ends it."""


def make(model: nn.Module, drafter: object = "own", **limits: object) -> Redrafter:
    host: tuple[Lookup, ...] = ()
    if drafter in ("own", "lookup"):
        host = (Lookup(3 if drafter == "own" else 2),)
        drafter = random_drafter(vocab_size=258) if drafter == "own" else None
    return Redrafter(
        model, byte_tokenizer(), drafter, host_drafters=host,  # type: ignore[arg-type]
        engine=EngineOptions(**limits),  # type: ignore[arg-type]
    )  # fmt: skip


Build = Callable[..., Redrafter]
"""Makes an engine as `make` does, of one model, and closes it after the test."""


def begin(redrafter: Redrafter) -> Generator[Response, None, None]:
    """Return an endless answer, which is running."""
    running = redrafter.stream([1, 2, 3], max_tokens=ENDLESS)
    next(running)
    return running


class Calls:
    """The calls of a target, in order: ("chunk", tokens) or ("step", batch rows)."""

    def __init__(self, redrafter: Redrafter) -> None:
        self.made: list[tuple[str, int]] = []
        target = redrafter.target
        append, verify = target.append, target.verify

        def counted_append(tokens: mx.array, *rest: object) -> mx.array:
            self.made.append(("chunk", tokens.shape[1]))
            return append(tokens, *rest)  # type: ignore[arg-type]

        def counted_verify(tree: object, cache: object, length: mx.array, *rest: object,
                           **named: object) -> object:  # fmt: skip
            self.made.append(("step", length.size))
            return verify(tree, cache, length, *rest, **named)  # type: ignore[arg-type]

        target.append = counted_append  # type: ignore[method-assign]
        target.verify = counted_verify  # type: ignore[assignment, method-assign]

    def of(self, kind: str) -> list[int]:
        return [size for which, size in self.made if which == kind]


def tokens_of(redrafter: Redrafter, prompt: abc.Sequence[int], **options: object) -> list[int]:
    return redrafter.generate(list(prompt), **options).token_ids  # type: ignore[arg-type]


def limit_to(redrafter: Redrafter, slots: int) -> MemoryBudget:
    """Leave memory for so many cache slots; all that is held now counts as weights."""
    gc.collect()
    budget = redrafter.core.scheduler.memory
    budget.weights = mx.get_active_memory()
    budget.limit = budget.weights + budget.work + int(slots * budget.slot)
    return budget


def failing(
    times: int, honest: Callable[..., object], failed: threading.Event | None = None
) -> Callable[..., object]:
    """Return a function that raises at the given call, and then sets `failed`."""
    left = [times]

    def call(*args: object, **named: object) -> object:
        left[0] -= 1
        if left[0] == 0:
            if failed is not None:
                failed.set()
            raise RuntimeError("the device is lost")
        return honest(*args, **named)

    return call


class Grammar:
    """A constraint that allows everything, and raises at one of its calls."""

    ended = False

    def __init__(self, method: str, calls: int) -> None:
        setattr(self, method, failing(calls, getattr(self, method)))

    def masks(self, tokens: abc.Sequence[int], parents: abc.Sequence[int]) -> None: ...

    def forced(self) -> abc.Sequence[int]:
        return ()

    def advance(self, token: int) -> None: ...


PROMPT = [72, 101, 108]
