"""The one door of drafters that may return anything: a user's own.

What they return is checked and repaired, without reading it on the host, and what they raise names
them. So the output stays the target's for any drafts, and a drafter that fails ends only the
answers that it drafts for.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.interface import Bindable, Drafter, Features, Memory, Seen
from redrafter_mlx.errors import (
    BadInputError,
    DrafterError,
    MismatchError,
    RedrafterError,
    device_failure,
)
from redrafter_mlx.speculation.beams import Beams, repaired
from redrafter_mlx.speculation.static_tree import StaticTree
from redrafter_mlx.target_model.model import Target

_Structure: TypeAlias = "int | tuple[_Structure, ...]"
"""The structure of a memory, with the number of dimensions in place of each array."""


def bound(drafter: Bindable, target: Target, tokenizer: TokenizerWrapper) -> Drafter:
    """Bind the drafter, evaluated, and have it checked unless it is known to be well-formed.

    Raises MismatchError for a target that it does not fit, and DrafterError if it fails.
    """
    check_drafter(drafter)
    with _named(drafter, "bind"):
        found = drafter.bind(target, tokenizer)
        if not isinstance(found, Drafter):
            raise TypeError(f"it returned a {type(found).__name__}, which is no Drafter")
        mx.eval([module.state for module in found.modules])
        if found.features.caches and not target.has_all_keys:
            raise MismatchError(
                f"{found.name} attends to the target's own keys, some of which other ranks hold; "
                f"give another --drafter, such as lookup, or one rank"
            )
        if found.well_formed:
            return found
        mx.eval(vars(found))  # another thread drafts, and could not evaluate them
        return Checked(found, target.vocab_size)


def check_drafter(drafter: Bindable) -> Bindable:
    """Return the drafter; raises BadInputError for what is none, such as a class or a name."""
    if isinstance(drafter, type) or not callable(getattr(drafter, "bind", None)):
        raise BadInputError(
            f"drafter is {drafter!r:.80}, which is none; give an object that derives from Drafter; "
            f"`load` takes names and folders too"
        )
    return drafter


class Checked(Drafter, well_formed=True):
    """A drafter whose beams are repaired, and whose errors are DrafterErrors with its name."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter, self._vocab_size = drafter, vocab_size
        self.note, self.tree, self._features = drafter.note, drafter.tree, drafter.features
        self._structure: _Structure = _structure_of(drafter.empty(1), 1)

    @property
    def name(self) -> str:
        return self._drafter.name

    @property
    def module(self) -> nn.Module | None:
        return self._drafter.module

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self._drafter.modules

    @property
    def features(self) -> Features:
        return self._features

    @property
    def max_width(self) -> int | None:
        return self._drafter.max_width

    @property
    def max_length(self) -> int | None:
        return self._drafter.max_length

    @property
    def trained_length(self) -> int | None:
        return self._drafter.trained_length

    @property
    def level_cost(self) -> float:
        return self._drafter.level_cost

    @property
    def block_cost(self) -> float:
        return self._drafter.block_cost

    @property
    def timing_key(self) -> str | None:
        return self._drafter.timing_key

    @property
    def can_cut(self) -> bool:
        return self._drafter.can_cut

    def along(self, tree: StaticTree) -> Drafter:
        return Checked(self._drafter.along(tree), self._vocab_size)

    def untrained(self) -> Bindable | None:
        return self._drafter.untrained()

    def readings(self) -> Mapping[str, Drafter]:
        readings = self._drafter.readings()
        return {words: Checked(each, self._vocab_size) for words, each in readings.items()}

    def empty(self, batch: int) -> Memory:
        with _named(self._drafter, "empty"):
            return self._checked(self._drafter.empty(batch), batch)

    def extend(self, memory: Memory, seen: Seen) -> Memory:
        with _named(self._drafter, "extend"):
            return self._checked(self._drafter.extend(memory, seen), seen.tokens.shape[0])

    def cut(self, memory: Memory, positions: int) -> Memory:
        with _named(self._drafter, "cut"):
            batch = next((a.shape[0] for a in _arrays(memory)), 0)
            return self._checked(self._drafter.cut(memory, positions), batch)

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        with _named(self._drafter, "draft"):
            beams, after = self._drafter.draft(memory, seen, shape)
            _check_beams(beams, seen.tokens.shape[0], shape)
            after = self._checked(after, seen.tokens.shape[0])
        return repaired(beams, seen.root, self._vocab_size), after

    def _checked(self, memory: Memory, batch: int) -> Memory:
        """Return the memory; raises TypeError unless it can be joined with any other of its own."""
        found = _structure_of(memory, batch)
        if self._features.every_position and () in (found, self._structure):
            self._structure = self._structure or found  # of no positions it may hold no arrays
        elif found != self._structure:
            raise TypeError(
                f"the memory's structure is {found}, and was {self._structure}: the numbers of "
                f"dimensions of its arrays must not change"
            )
        return memory


@contextmanager
def _named(drafter: Bindable, method: str) -> Iterator[None]:
    """Raise a DrafterError that names the drafter for an error of its own code.

    Not for a failure of the device, which computes for all answers.
    """
    try:
        yield
    except RedrafterError:
        raise
    except Exception as error:
        if device_failure(error) is not None:
            raise
        traceback.clear_frames(error.__traceback__)  # which hold the caches of the step
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DrafterError(
            f"the drafter {type(drafter).__name__} failed in `{method}`: {reason}"
        ) from error


def _check_beams(beams: object, batch: int, shape: BeamShape) -> None:
    """Raise TypeError for beams of a wrong type or shape; their values are not read."""
    if not isinstance(beams, Beams) or not isinstance(beams.tokens, mx.array):
        raise TypeError(f"it returned {type(beams).__name__} in place of Beams of arrays")
    limits, W, L = (batch, shape.width, shape.length), 0, 0
    if beams.tokens.ndim == 3:
        _, W, L = beams.tokens.shape
    if beams.tokens.shape != (batch, W, L) or not (0 < W <= limits[1] and 0 < L <= limits[2]):
        raise TypeError(
            f"tokens have the shape {beams.tokens.shape}; at most {limits} was asked for"
        )
    for name, array, kind in (
        ("tokens", beams.tokens, mx.integer),
        ("log_probs", beams.log_probs, mx.floating),
        ("parents", beams.parents, mx.integer),
    ):
        if name == "parents" and array is None:
            continue
        if not isinstance(array, mx.array) or array.shape != beams.tokens.shape:
            raise TypeError(f"{name} are not an array of the tokens' shape {beams.tokens.shape}")
        if not mx.issubdtype(array.dtype, kind):
            raise TypeError(f"{name} are of type {array.dtype}, not {kind}")


def _structure_of(memory: object, batch: int) -> _Structure:
    """Return a memory's structure; raises TypeError for what is no memory of `batch` rows."""
    if not isinstance(memory, tuple):
        raise TypeError(f"the memory is a {type(memory).__name__}, not a tuple of arrays or tuples")
    found: list[_Structure] = []
    for part in memory:
        if not isinstance(part, mx.array):
            found.append(_structure_of(part, batch))
        elif part.shape[:1] != (batch,):
            raise TypeError(
                f"an array of the memory has the shape {part.shape}, not ({batch}, ...)"
            )
        else:
            found.append(part.ndim)
    return tuple(found)


def _arrays(memory: Memory) -> Iterator[mx.array]:
    for part in memory:
        if isinstance(part, mx.array):
            yield part
        else:
            yield from _arrays(part)
