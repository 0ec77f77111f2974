"""The one interface that every form of drafter implements.

To add a form, write one file with a class that derives from `Drafter` and implements `draft`. The
class declares what it needs from the decoding loop; no code outside its file asks which form it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Protocol, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.rejection import SampledDrafts
from redrafter_mlx.speculation.sampling import Draws
from redrafter_mlx.speculation.static_tree import StaticTree
from redrafter_mlx.target_model.cache.slots import Committed
from redrafter_mlx.target_model.model import Target

Memory: TypeAlias = "tuple[mx.array | Memory, ...]"
"""A drafter's state for a batch of sequences: a tree of arrays, () if there is none.

Every array has the batch as its first axis.
"""


LEVEL_COST = 0.07
"""Cost of a level of this package's own form, as a share of a target call with one query row."""


@dataclass(frozen=True)
class Features:
    """What a drafter reads from the target.

    layers:         the target's layers whose inputs it reads, counted from 0
    hidden:         whether it reads the final norm's output, which is the last part of
                    `Seen.features` even if only layers are read
    every_position: whether it must see every position of the text, because its memory covers them;
                    otherwise the newest is enough
    caches:         the target's caches, counted from 0, whose keys and values it attends to
    """

    layers: tuple[int, ...] = ()
    hidden: bool = False
    every_position: bool = False
    caches: tuple[int, ...] = ()

    @property
    def any(self) -> bool:
        """Whether it reads anything from the target in addition to the tokens."""
        return self.hidden or bool(self.layers)


@dataclass(frozen=True)
class Seen:
    """Committed positions of the text, and the token after them.

    Shapes:
      tokens:   [B, P + 1] int32; tokens[b, i] is at position[b] + i, and tokens[b, count[b]] is the
                root of the next tree; undefined after that
      features: [B, P, C], the target's features at the first P positions, as the drafter's
                `Features` declare; None if they declare none
      position: [B] int32, of tokens[:, 0] in the text
      count:    [B] int32, committed positions, at most P

    bound: upper bound of position + count, known on the host
    start: the position of all sequences if the host knows it, as in prompts; else None
    draws: the noise of the target's draws after the root, for the drafts of `sample`; else None
    committed: the target's keys and values of all committed positions, from the caches that
           `Features` declare; None if it declares none, and where nothing is drafted
    """

    tokens: mx.array
    features: mx.array | None
    position: mx.array
    count: mx.array
    bound: int
    start: int | None = None
    draws: Draws | None = None
    committed: Committed | None = None

    @property
    def root(self) -> mx.array:
        """[B] int32, the token after the committed positions; all drafts start with it."""
        if self.tokens.shape[1] == 2:
            return self.tokens[:, 1]
        return mx.take_along_axis(self.tokens, self.count[:, None], axis=1)[:, 0]

    @property
    def root_position(self) -> mx.array:
        """[B] int32, the position of the root in the text."""
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
        """Return the batch rows at `index`."""
        features = None if self.features is None else self.features[index]
        return replace(
            self,
            tokens=self.tokens[index],
            features=features,
            position=self.position[index],
            count=self.count[index],
        )


class Bindable(Protocol):
    """A drafter, or something that becomes one when bound to a target."""

    def bind(self, target: Target, tokenizer: TokenizerWrapper) -> Drafter: ...


class Drafter(ABC):
    """Drafts the tokens that the target will choose next.

    Drafts may depend on the text so far, and on nothing that comes later. Then any drafts are safe,
    for the argmax and for draws.

    note: one line for the user on how it drafts, if there is something to say
    tree: the static tree that is the only shape it drafts; None if it drafts any shape
    folder: the folder that it was loaded from; None for any other, and for two together
    well_formed: whether its beams are known to be as `Beams` describes them. Others are repaired,
                 see `Checked`. A class declares it for itself alone, `class Form(Drafter,
                 well_formed=True)`: classes that derive from it may draft anything
    """

    note: str | None = None
    tree: StaticTree | None = None
    folder: Path | None = None
    well_formed: ClassVar[bool] = False

    def __init_subclass__(cls, *, well_formed: bool = False) -> None:
        super().__init_subclass__()
        cls.well_formed = well_formed

    def bind(self, target: Target, tokenizer: TokenizerWrapper) -> Drafter:
        """Return the drafter for this target: itself, unless it uses parts of the target.

        Raises MismatchError, naming what differs, for a target that it does not fit.
        """
        del target, tokenizer
        return self

    @property
    def name(self) -> str:
        """Short name for display and records."""
        return "drafter"

    @property
    def label(self) -> str:
        """The name, and the static tree that it drafts along if there is one."""
        return self.name if self.tree is None else f"{self.name} along {self.tree}"

    @property
    def module(self) -> nn.Module | None:
        """The module with the parameters that it drafts with, None if there are none."""
        return None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """All modules that it drafts with."""
        return () if self.module is None else (self.module,)

    @property
    def features(self) -> Features:
        """What it reads from the target."""
        return Features()

    @property
    def max_width(self) -> int | None:
        """Maximum beam width that it can draft, None without a limit."""
        return None

    @property
    def max_length(self) -> int | None:
        """Maximum beam length that it can draft, the root included; None without a limit.

        Longer beams are cut to this length.
        """
        return None

    @property
    def trained_length(self) -> int | None:
        """Maximum beam length that it was trained for, the root included; None if not known."""
        return self.max_length

    @property
    def level_cost(self) -> float:
        """Cost of one level with one beam, as a share of a target call with one query row.

        An assumption that is used until drafting has been timed.
        """
        return LEVEL_COST

    @property
    def block_cost(self) -> float:
        """Cost of what is computed once for a whole tree, in the same unit, such as a block."""
        return 0.0

    @property
    def timing_key(self) -> str | None:
        """Equal for drafters that take equal times; None if no other drafter does.

        Times are stored on disk under this key; without a key they are not stored.
        """
        return None

    @property
    def can_draw(self) -> bool:
        """Whether `draw` is implemented. Only well-formed drafters are asked for draws: whether
        drafts come from the distributions that a drafter states cannot be checked.

        Without draws, acceptance by rejection reduces to a draw at each node. A draft proposed with
        certainty would be accepted with the target's own probability of it, and otherwise replaced
        by a draw from the other tokens, which together is one draw from the target.
        """
        return False

    def along(self, tree: StaticTree) -> Drafter:
        """Return the same drafter along a static tree; raise BadInputError if it cannot do that."""
        raise BadInputError(f"{self.name} cannot draft along {tree}")

    def untrained(self) -> Bindable | None:
        """Return an untrained baseline of the same form and cost; None if there is none."""
        return None

    def readings(self) -> Mapping[str, Drafter]:
        """Return the drafters of other readings of its files, by description; see calibration."""
        return {}

    def empty(self, batch: int) -> Memory:
        """Return the memory of `batch` empty texts."""
        del batch
        return ()

    def extend(self, memory: Memory, seen: Seen) -> Memory:
        """Add committed positions: a chunk of the prompt, or the positions of steps without drafts.

        It may return arrays that replace those of `memory`, which is not used again.
        """
        del seen
        return memory

    @property
    def can_cut(self) -> bool:
        """Whether a memory that covers every position can be that of fewer positions."""
        return True

    def cut(self, memory: Memory, positions: int) -> Memory:
        """Return the memory of the first positions alone, if its size grows with the text."""
        del positions
        return memory

    def drafted(self, shape: BeamShape) -> BeamShape:
        """Return the shape, cut to the maximum width and length that it can draft."""
        width = min(shape.width, self.max_width or shape.width)
        length = min(shape.length, self.max_length or shape.length)
        if (width, length) == (shape.width, shape.length):
            return shape
        return BeamShape(width, length, shape.max_nodes)

    @abstractmethod
    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        """Return candidates that start with `seen.root`, and the new memory.

        The memory must cover committed positions alone: features computed from guesses would make
        later drafts worse.

        seen: the newest committed positions; all earlier ones were given to `extend` or `draft`
        """

    def draw(
        self,
        memory: Memory,
        seen: Seen,
        shape: BeamShape,
        keys: mx.array,
        params: SamplingParams,
    ) -> tuple[SampledDrafts, Memory]:
        """Draft candidates drawn without replacement; return them with their distributions.

        keys: [B, 2] uint32; see `draw_drafts`
        """
        raise NotImplementedError(f"{type(self).__name__} cannot draw")
