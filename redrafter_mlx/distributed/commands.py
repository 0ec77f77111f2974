"""What rank 0 tells the other ranks: which call of the target comes next, on which cache.

A command is part of the graph of the call that it announces. So a step that rank 0 builds and drops
is never told, and commands come in the order in which the calls are computed.
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
How = Literal["new", "flush", "take", "join", "share", "trim"]

Fields: TypeAlias = "dict[str, Any]"
"""What JSON holds of a command; an array is its index among the command's arrays."""


@dataclass(frozen=True, eq=False)
class Stored:
    """A cache that every rank holds, under a number."""

    number: int


@dataclass(frozen=True, eq=False)
class Made:
    """A cache that follows from others.

    arrays: of flush the accepted path, the drafts accepted and the length before; of take the rows
    slots:  of trim
    """

    how: How
    of: tuple[Origin, ...] = ()
    arrays: tuple[mx.array, ...] = ()
    slots: int = 0


Origin: TypeAlias = "Stored | Made"
"""Where the contents of a cache come from."""


@dataclass(frozen=True)
class Command:
    """One command, as the other ranks get it."""

    word: Word
    fields: Fields
    arrays: Sequence[mx.array]


class CommandWriter:
    """One command, while it is put together."""

    def __init__(self) -> None:
        self._arrays: list[mx.array] = []

    def array(self, array: mx.array) -> int:
        """Add an array of whole numbers or truth values; its index."""
        self._arrays.append(array)
        return len(self._arrays) - 1

    def origin(self, origin: Origin) -> int | Fields:
        """Add where a cache comes from."""
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
        """An array that is computed once all ranks have got the command, which is sent `after`."""
        forms = [[a.dtype == mx.bool_, *a.shape] for a in self._arrays]
        text = json.dumps({"word": word, **fields, "forms": forms}).encode()
        words = np.frombuffer(text.ljust(-(-len(text) // 4) * 4), np.int32)
        flat = [array.reshape(-1).astype(mx.int32) for array in self._arrays]
        sizes = mx.array([len(words), sum(a.size for a in self._arrays)], mx.int32)
        body = mx.concatenate([mx.array(words), *flat])
        told = ranks.broadcast(mx.depends(sizes, after))
        return ranks.broadcast(mx.depends(body, told))


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
