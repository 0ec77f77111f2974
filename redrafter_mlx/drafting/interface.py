"""What a drafter is: the one interface that every form of drafter implements.

To add a form, write one file with a class that derives from `Drafter` and implements `draft`. What
it needs of the loop it declares; nothing outside of its file asks which form it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.speculation.rejection import SampledDrafts
from redrafter_mlx.speculation.static_tree import StaticTree
from redrafter_mlx.speculation.tree import Beams
from redrafter_mlx.target.model import Target

Memory: TypeAlias = "tuple[mx.array | Memory, ...]"
"""What a drafter remembers of a batch of sequences: a tree of arrays, () for nothing.

Every array has the batch as its first axis.
"""


@dataclass(frozen=True)
class Features:
    """What a drafter reads of the target.

    layers:         the target's layers whose inputs it reads, counted from 0
    hidden:         whether it reads the final norm's output; it comes last in `Seen.features`,
                    also where only layers are read
    every_position: whether it must see every position of the text, because it remembers them;
                    otherwise the newest is enough
    """

    layers: tuple[int, ...] = ()
    hidden: bool = False
    every_position: bool = False

    @property
    def any(self) -> bool:
        """Whether it reads anything of the target beside the tokens."""
        return self.hidden or bool(self.layers)


@dataclass(frozen=True)
class Seen:
    """Committed positions of the text, and the token after them.

    Shapes:
      tokens:   [B, P + 1] int32; tokens[b, i] stands at position[b] + i, and tokens[b, count[b]],
                the root of the next tree, is the last that means anything
      features: [B, P, C], the target's features at the first P positions, as `Features` asks for
                them; None if it asks for none
      position: [B] int32, where tokens[:, 0] stands in the text
      count:    [B] int32, committed positions, at most P

    bound: the most that position + count can be, known on the host
    start: the position of all sequences, where the host knows it: in prompts; else None
    """

    tokens: mx.array
    features: mx.array | None
    position: mx.array
    count: mx.array
    bound: int
    start: int | None = None

    @property
    def root(self) -> mx.array:
        """[B] int32, the token after the committed positions, with which all drafts begin."""
        if self.tokens.shape[1] == 2:
            return self.tokens[:, 1]
        return mx.take_along_axis(self.tokens, self.count[:, None], axis=1)[:, 0]

    @property
    def root_position(self) -> mx.array:
        """[B] int32, where the root stands in the text."""
        return self.position + self.count

    @property
    def newest(self) -> mx.array:
        """Features [B, C] at the last committed position."""
        assert self.features is not None, "a drafter reads what its `features` declare"
        if self.features.shape[1] == 1:
            return self.features[:, 0]
        last = mx.maximum(self.count - 1, 0)[:, None, None]
        return mx.take_along_axis(self.features, last, axis=1)[:, 0]

    def take(self, index: mx.array) -> Seen:
        """The same of the batch rows at `index`."""
        features = None if self.features is None else self.features[index]
        return replace(
            self,
            tokens=self.tokens[index],
            features=features,
            position=self.position[index],
            count=self.count[index],
        )


class Bindable(Protocol):
    """A drafter, or what becomes one with a target."""

    def bind(self, target: Target, tokenizer: TokenizerWrapper) -> Drafter: ...


class Drafter(ABC):
    """Guesses what the target will choose next.

    What it proposes may depend on the text so far and on nothing that comes later; then any drafts
    whatever are safe, for the argmax and for draws.

    note: one line for the user on how it drafts, if there is something to say
    """

    note: str | None = None

    def bind(self, target: Target, tokenizer: TokenizerWrapper) -> Drafter:
        """The drafter for this target, which is itself unless it takes something of the target.

        Raises MismatchError, naming what differs, for a target that it does not fit.
        """
        del target, tokenizer
        return self

    @property
    def name(self) -> str:
        """What it is, in a word or two for people and records."""
        return "drafter"

    @property
    def module(self) -> nn.Module | None:
        """What holds the parameters that it drafts with, if there are any."""
        return None

    @property
    def features(self) -> Features:
        """What it reads of the target."""
        return Features()

    @property
    def max_width(self) -> int | None:
        """The widest beam that it can draft, None without a limit."""
        return None

    @property
    def most_length(self) -> int | None:
        """The longest beam that it can draft, the root included; None without a limit.

        Of a longer one, it drafts so much.
        """
        return None

    @property
    def max_length(self) -> int | None:
        """The longest beam that it was trained for, the root included; None if not known."""
        return self.most_length

    @property
    def tree(self) -> StaticTree | None:
        """The static tree along which it drafts, in no other shape; None if it drafts any."""
        return None

    @property
    def level_cost(self) -> float:
        """An assumption until drafting was timed: one level of beam search with one beam takes so
        much of a target call with one query row."""
        return 0.07

    @property
    def timing_key(self) -> str | None:
        """Equal for drafters that take equal times; None for one that is like no other.

        Times are kept on disk under this key, and not at all without one.
        """
        return None

    @property
    def can_draw(self) -> bool:
        """Whether `draw` is implemented.

        Without it, acceptance by rejection comes down to a draw at each node: a draft that is
        certain would be kept with the target's own probability of it, and replaced by a draw from
        the other tokens if not, which together is one draw from the target.
        """
        return False

    def along(self, tree: StaticTree) -> Drafter:
        """The same drafter along a static tree; raises BadInputError if it has no such drafts."""
        raise BadInputError(f"{self.name} cannot draft along {tree}")

    def untrained(self) -> Bindable | None:
        """A baseline of the same form and cost that has learned nothing; None if there is none."""
        return None

    def readings(self) -> Mapping[str, Drafter]:
        """Other drafters that its files may mean, in words; see calibration."""
        return {}

    def empty(self, batch: int) -> Memory:
        """What it remembers of `batch` empty texts."""
        del batch
        return ()

    def extend(self, memory: Memory, seen: Seen) -> Memory:
        """Remember committed positions: a chunk of the prompt, or what it missed while parked.

        It may return arrays that replace those of `memory`, which is not used again.
        """
        del seen
        return memory

    @abstractmethod
    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        """Candidates that start with `seen.root`, and what to remember from now on.

        seen: the newest committed positions; all before them have been given to `extend` or to
              `draft` earlier. What is remembered must be of committed positions alone: features
              computed from guesses would make later drafts worse.
        """

    def draw(
        self,
        memory: Memory,
        seen: Seen,
        shape: BeamShape,
        keys: mx.array,
        params: SamplingParams,
    ) -> tuple[SampledDrafts, Memory]:
        """The same with candidates drawn without replacement, and what they were drawn from.

        keys: [B, 2] uint32; see `draw_drafts`
        """
        raise NotImplementedError(f"{type(self).__name__} cannot draw")
