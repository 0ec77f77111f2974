"""Commands from rank 0 to the other ranks: the next call of the target, and its cache.

A command is part of the graph of the call that it announces. So a step that rank 0 builds and drops
is never announced, and commands arrive in the order in which the calls are computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import mlx.core as mx
import numpy as np

from redrafter_mlx.distributed.group import Ranks

Word = Literal["append", "verify", "keep", "plain", "batch", "sums"]
How = Literal["new", "unpacked", "flush", "take", "join", "share", "trim"]

Fields: TypeAlias = "dict[str, Any]"
"""The JSON part of a command; an array is given as its index in the command's arrays."""


@dataclass(frozen=True, eq=False)
class Stored:
    """A cache that every rank holds under the same number."""

    number: int


@dataclass(frozen=True, eq=False)
class Made:
    """A cache that is derived from others, or a new one; an `unpacked` one quantises nothing.

    arrays: for flush: the accepted path, the number of accepted drafts and the length before;
            for take: the batch rows
    slots:  for share, trim and take; None takes all
    """

    how: How
    of: tuple[Origin, ...] = ()
    arrays: tuple[mx.array, ...] = ()
    slots: int | None = 0


Origin: TypeAlias = "Stored | Made"
"""The origin of a cache's contents."""


@dataclass(frozen=True)
class Command:
    """One command, as the other ranks receive it."""

    word: Word
    fields: Fields
    arrays: Sequence[mx.array]


class CommandWriter:
    """One command under construction."""

    def __init__(self) -> None:
        self._arrays: list[mx.array] = []

    def array(self, array: mx.array) -> int:
        """Add an array of integers or booleans; return its index."""
        self._arrays.append(array)
        return len(self._arrays) - 1

    def origin(self, origin: Origin) -> int | Fields:
        """Add the origin of a cache; return it as JSON fields."""
        if isinstance(origin, Stored):
            return origin.number
        return {
            "how": origin.how,
            "of": [self.origin(each) for each in origin.of],
            "arrays": [self.array(each) for each in origin.arrays],
            "slots": origin.slots,
        }

    def send(
        self, ranks: Ranks, after: mx.array, word: Word, fields: Mapping[str, object]
    ) -> mx.array:
        """Send the command after `after`; return an array that is ready once all ranks have it."""
        forms = [[a.dtype == mx.bool_, *a.shape] for a in self._arrays]
        text = json.dumps({"word": word, **fields, "forms": forms}).encode()
        words = np.frombuffer(text.ljust(-(-len(text) // 4) * 4), np.int32)
        flat = [array.reshape(-1).astype(mx.int32) for array in self._arrays]
        sizes = mx.array([len(words), sum(a.size for a in self._arrays)], mx.int32)
        body = mx.concatenate([mx.array(words), *flat])
        sizes_sent = ranks.broadcast(mx.depends(sizes, after))
        return ranks.broadcast(mx.depends(body, sizes_sent))


def receive(ranks: Ranks) -> Command:
    """Wait for rank 0's next command."""
    words, size = cast("list[int]", ranks.broadcast(mx.zeros((2,), mx.int32)).tolist())
    body = np.array(ranks.broadcast(mx.zeros((words + size,), mx.int32)))
    fields = json.loads(body[:words].tobytes())
    arrays, at = [], words
    for truth, *shape in fields["forms"]:
        count = int(np.prod(shape))
        array = mx.array(body[at : at + count]).reshape(shape)
        arrays.append(array.astype(mx.bool_) if truth else array)
        at += count
    return Command(fields["word"], fields, arrays)
