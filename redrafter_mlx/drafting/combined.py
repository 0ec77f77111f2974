"""Two drafters together: their candidates share the beams of one tree."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.checked import bound
from redrafter_mlx.drafting.interface import Drafter, Features, Memory, Seen
from redrafter_mlx.speculation.beams import Beams, join_beams, likelier_candidate
from redrafter_mlx.target_model.model import Target


class Combined(Drafter, well_formed=True):
    """Half of the beams from each of two drafters; for a single beam, the likelier candidate.

    Its memory is the pair of their memories. `bind` has both checked that are not known to be
    well-formed.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._both = first, second
        self.note = "; ".join(note for note in (first.note, second.note) if note) or None

    def bind(self, target: Target, tokenizer: TokenizerWrapper) -> Combined:
        return Combined(*(bound(part, target, tokenizer) for part in self._both))

    @property
    def name(self) -> str:
        return " and ".join(drafter.name for drafter in self._both)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(module for drafter in self._both for module in drafter.modules)

    @property
    def features(self) -> Features:
        each = [drafter.features for drafter in self._both]
        return Features(
            tuple(sorted({layer for wanted in each for layer in wanted.layers})),
            any(wanted.hidden for wanted in each),
            any(wanted.every_position for wanted in each),
            tuple(sorted({cache for wanted in each for cache in wanted.caches})),
        )

    @property
    def max_width(self) -> int | None:
        widths = [drafter.max_width for drafter in self._both if drafter.max_width is not None]
        return 2 * min(widths) if widths else None

    @property
    def max_length(self) -> int | None:
        first, second = (drafter.max_length for drafter in self._both)
        return None if first is None or second is None else max(first, second)

    @property
    def trained_length(self) -> int | None:
        first, second = (drafter.trained_length for drafter in self._both)
        return None if first is None or second is None else max(first, second)

    @property
    def level_cost(self) -> float:
        return sum(drafter.level_cost for drafter in self._both)

    @property
    def block_cost(self) -> float:
        return sum(drafter.block_cost for drafter in self._both)

    @property
    def timing_key(self) -> str | None:
        first, second = (drafter.timing_key for drafter in self._both)
        return None if first is None or second is None else f"{first} + {second}"

    def empty(self, batch: int) -> Memory:
        first, second = self._both
        return first.empty(batch), second.empty(batch)

    def extend(self, memory: Memory, seen: Seen) -> Memory:
        first, second = cast("tuple[Memory, Memory]", memory)
        one, other = self._both
        first = one.extend(first, self._part(seen, one))
        return first, other.extend(second, self._part(seen, other))

    @property
    def can_cut(self) -> bool:
        return all(drafter.can_cut for drafter in self._both)

    def cut(self, memory: Memory, positions: int) -> Memory:
        first, second = cast("tuple[Memory, Memory]", memory)
        one, other = self._both
        return one.cut(first, positions), other.cut(second, positions)

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        """Draft with both; a prefix that both propose appears once, with its better score."""
        first, second = cast("tuple[Memory, Memory]", memory)
        one, other = self._both
        W, L = shape.width, shape.length
        half, rest = BeamShape(max(W - W // 2, 1), L), BeamShape(max(W // 2, 1), L)
        beams, first = one.draft(first, self._part(seen, one), one.drafted(half))
        more, second = other.draft(second, self._part(seen, other), other.drafted(rest))
        if W == 1:
            return likelier_candidate(beams, more), (first, second)
        return _in_turn(join_beams(beams, more), beams.tokens.shape[1]), (first, second)

    def _part(self, seen: Seen, drafter: Drafter) -> Seen:
        """Return `seen` with only those features that one of the two drafters reads."""
        wanted, all_layers = drafter.features, self.features.layers
        if seen.committed is not None:
            known = [*map(self.features.caches.index, wanted.caches)]
            seen = replace(seen, committed=seen.committed.of(known) if known else None)
        if seen.features is None or wanted.layers == all_layers:
            return seen
        size = seen.features.shape[-1] // (len(all_layers) + 1)
        indices = [*(all_layers.index(layer) for layer in wanted.layers), len(all_layers)]
        parts = [seen.features[..., i * size : (i + 1) * size] for i in indices]
        return replace(seen, features=mx.concatenate(parts, axis=-1))


def _in_turn(beams: Beams, first: int) -> Beams:
    """Reorder the beams so that those of the two drafters take turns; `first` are the first's.

    So the first w beams are about those that both would have drafted with width w, as acceptance
    statistics assume.
    """
    W = beams.tokens.shape[1]
    pairs = zip_longest(range(first), range(first, W))
    turns = [i for pair in pairs for i in pair if i is not None]
    order, place = mx.array(turns), mx.array([turns.index(i) for i in range(W)])
    parents = place[beams.parent_indices[:, order]]
    return Beams(beams.tokens[:, order], beams.log_probs[:, order], parents)
