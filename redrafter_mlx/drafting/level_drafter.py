"""Drafters that draft level by level: beam search over them, draws, and static trees.

A form that derives from these classes implements its distribution, and inherits all searches.
"""

from __future__ import annotations

import copy
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.drafting.interface import Drafter, Features, Memory, Seen
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.speculation.beam_search import Levels, beam_search, check_width
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.speculation.rejection import SampledDrafts, draw_drafts
from redrafter_mlx.speculation.sampling import Draws
from redrafter_mlx.speculation.static_tree import StaticTree, static_tree
from redrafter_mlx.target_model.compiled import CompiledGraphs
from redrafter_mlx.target_model.fingerprint import nbytes_of, shapes_hash
from redrafter_mlx.target_model.model import Target

_Paths: TypeAlias = "tuple[tuple[int, ...], ...] | None"
_Searches: TypeAlias = (
    "CompiledGraphs[[mx.array, mx.array, tuple[int, int], _Paths, tuple[mx.array, ...] | None],"
    " tuple[mx.array, mx.array, mx.array]]"
)
_D = TypeVar("_D", bound="LevelDrafter")
_M = TypeVar("_M", bound="MemorylessDrafter")
_Network = TypeVar("_Network", bound=nn.Module)


class DraftLevels(Levels):
    """The levels of a drafter that may have a memory."""

    @property
    def memory(self) -> Memory:
        """The drafter's memory after its levels have been searched."""
        return ()


class IndependentLevels(DraftLevels):
    """Levels that do not depend on the tokens drafted before.

    Shapes:
      logits: [B, 1, V'] float32, one array for each level that will be used
    """

    independent = True

    def __init__(
        self, vocabulary: DraftVocabulary, logits: Sequence[mx.array], memory: Memory = ()
    ) -> None:
        """`memory` is the drafter's after them."""
        super().__init__(vocabulary)
        self._logits, self._memory = logits, memory
        self._level = 0

    @property
    def memory(self) -> Memory:
        return self._memory

    def first(self) -> mx.array:
        return self._logits[0]

    def following(self, parents: mx.array, tokens: mx.array) -> mx.array:
        """Return the same logits for every beam."""
        del parents
        self._level += 1
        logits = self._logits[self._level]
        return mx.broadcast_to(logits, (*tokens.shape, logits.shape[-1]))


class LevelDrafter(Drafter):
    """A drafter whose levels are searched: by beam search, or along a static tree."""

    def __init__(self, name: str, network: nn.Module, vocabulary: DraftVocabulary) -> None:
        """`vocabulary` are the tokens that it can draft."""
        self._name, self._module, self.vocabulary = name, network, vocabulary

    @property
    def name(self) -> str:
        return self._name

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def timing_key(self) -> str:
        fewer = self.scores_all and self.vocabulary.share < 1
        over = f" over {self.vocabulary.size} tokens" if fewer else ""
        return f"{self._name} {shapes_hash(self._module)}{over}"

    @property
    def scores_all(self) -> bool:
        """Whether it can score all tokens with the target's output layer."""
        return False

    def within(self: _D, vocabulary: DraftVocabulary) -> _D:
        """Return the same drafter of these tokens alone, if it `scores_all`."""
        raise NotImplementedError(f"{self.name} with {vocabulary.size} tokens")

    def uncompiled(self) -> LevelDrafter:
        """Return it without compiled graphs, for sizes that occur once."""
        return self

    @abstractmethod
    def levels(self, memory: Memory, seen: Seen, drafts: int) -> DraftLevels:
        """Return draft levels after `seen.root`, of which the first `drafts` will be used."""

    @property
    def max_width(self) -> int:
        """The number of tokens that it can draft after the root."""
        return self.vocabulary.size

    @property
    def can_draw(self) -> bool:
        """False along a static tree, since draws have no ranks."""
        return self.tree is None

    def along(self: _D, tree: StaticTree) -> _D:
        """Return the same drafter along a static tree."""
        if self.max_length is not None and tree.shape.length > self.max_length:
            raise BadInputError(f"{tree}; {self.name} drafts {self.max_length - 1} at most")
        check_width(self.max_width, tree.max_ranks)
        drafter = copy.copy(self)
        drafter.tree = tree
        return drafter

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        """Draft the likeliest candidates by beam search, or those of the static tree."""
        shape = self.drafted(shape)
        levels = self.levels(memory, seen, shape.length - 1)
        return _search(levels, seen.root, shape, self.tree, seen.draws), levels.memory

    def draw(
        self,
        memory: Memory,
        seen: Seen,
        shape: BeamShape,
        keys: mx.array,
        params: SamplingParams,
    ) -> tuple[SampledDrafts, Memory]:
        """Draw candidates from the drafter's distribution; see `draw_drafts`."""
        shape = self.drafted(shape)
        levels = self.levels(memory, seen, shape.length - 1)
        drafts = draw_drafts(levels, seen.root, seen.root_position, keys, shape, params)
        return drafts, levels.memory

    def drafted(self, shape: BeamShape) -> BeamShape:
        """Return the shape, cut to the maximum length that the drafter can draft.

        Raises BadInputError for a shape other than a static tree's.
        """
        if self.tree is not None and shape != self.tree.shape:
            raise BadInputError(f"the drafter drafts {self.tree}, and no other shape")
        length = min(shape.length, self.max_length or shape.length)
        return shape if length == shape.length else replace(shape, length=length)


class MemorylessDrafter(LevelDrafter):
    """A drafter without memory, which reads only the target's newest features.

    Its search is one compiled graph.
    """

    def __init__(self, name: str, network: nn.Module, vocabulary: DraftVocabulary) -> None:
        super().__init__(name, network, vocabulary)
        self._searches = self._compiled()

    def _compiled(self) -> _Searches:
        """Return the search as compiled graphs, which do not keep the drafter alive."""
        this = weakref.ref(self)

        def search(
            features: mx.array,
            root: mx.array,
            sizes: tuple[int, int],
            paths: _Paths,
            draws: tuple[mx.array, ...] | None,
        ) -> tuple[mx.array, mx.array, mx.array]:
            shape = BeamShape(*sizes)
            drafter = this()
            assert drafter is not None, "it calls this"
            levels = drafter.levels_of(features, root, shape.length - 1)
            tree = None if paths is None else StaticTree(paths)
            beams = _search(levels, root, shape, tree, None if draws is None else Draws(*draws))
            return beams.tokens, beams.log_probs, beams.parent_indices

        return CompiledGraphs(search)

    def along(self: _M, tree: StaticTree) -> _M:
        drafter = super().along(tree)
        drafter._searches = drafter._compiled()
        return drafter

    @abstractmethod
    def levels_of(self, features: mx.array, root: mx.array, drafts: int) -> DraftLevels:
        """Return draft levels after `root` [B], given the target's features [B, C] before it."""

    def levels(self, memory: Memory, seen: Seen, drafts: int) -> DraftLevels:
        del memory
        return self.levels_of(seen.newest, seen.root, drafts)

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        """Run the same search as one compiled graph."""
        shape = self.drafted(shape)
        sizes = (shape.width, shape.length)
        paths = None if self.tree is None else self.tree.paths
        draws = None if seen.draws is None else tuple(seen.draws)
        size = (seen.newest.shape, sizes, paths, draws is not None)
        found = self._searches.call(size, seen.newest, seen.root, sizes, paths, draws)
        return Beams(*found, distinct=True), memory


class HeadsDrafter(MemorylessDrafter):
    """Heads over the target's last hidden state, one for each draft of a candidate."""

    def __init__(
        self,
        name: str,
        network: nn.Module,
        vocabulary: DraftVocabulary,
        target: Target,
        heads: int,
        bytes_of_level: float,
    ) -> None:
        super().__init__(name, network, vocabulary)
        self._heads = heads
        self._cost = min(bytes_of_level / nbytes_of(target.model), 1.0)

    @property
    def features(self) -> Features:
        return Features(hidden=True)

    @property
    def max_length(self) -> int:
        return self._heads + 1

    @property
    def level_cost(self) -> float:
        """Bytes that one head reads, as a share of those that a target call reads."""
        return self._cost


def shuffled(network: _Network) -> _Network:
    """Return an untrained copy: the rows of each parameter, quantised ones too, in random order."""
    mixed = copy.deepcopy(network)
    key = mx.random.key(0)
    mixed.update(tree_map(lambda a: mx.random.permutation(a, key=key), network.parameters()))
    return mixed


class NoisyLevels(Levels):
    """Levels plus the noise that the target will draw with, so that drafts guess its very draws.

    The target draws argmax(log p / T + noise). With the drafter's belief in place of p, the
    likeliest draft is the draw that the drafter expects.
    """

    def __init__(self, levels: Levels, draws: Draws) -> None:
        super().__init__(levels.vocabulary)
        self._levels, self.independent = levels, levels.independent
        self._noise = levels.vocabulary.of_tokens(draws.noise)  # [B, L, V']
        self._temperature = draws.temperature[:, None, None]
        self._depth = 0

    def first(self) -> mx.array:
        return self._noisy(self._levels.first())

    def following(self, parents: mx.array, tokens: mx.array) -> mx.array:
        self._depth += 1
        return self._noisy(self._levels.following(parents, tokens))

    def _noisy(self, logits: mx.array) -> mx.array:
        return logits / self._temperature + self._noise[:, self._depth, None]


def _search(
    levels: Levels,
    root: mx.array,
    shape: BeamShape,
    tree: StaticTree | None,
    draws: Draws | None,
) -> Beams:
    if draws is not None:
        levels = NoisyLevels(levels, draws)
    if tree is None:
        return beam_search(levels, root, shape)
    return static_tree(levels, root, tree)
