"""DFlash: a block of mask tokens that predicts all drafts of a step in one call.

Chen et al. (arXiv 2602.06036); `network.py` has the equations. The rows after the root give
one distribution for each draft, and these do not depend on one another's tokens. So the likeliest
prefixes are those with the largest products of probabilities, which beam search finds exactly: kept
up to a number of nodes, they are DDTree's tree (arXiv 2604.12989). JetSpec (arXiv 2606.18394) has
the same tensors, and a causal block.

The cache keeps context rows of committed positions alone; a block's rows follow them for one step.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import mlx.core as mx

from redrafter_mlx.drafting.cached_levels import CachedDrafter, memory_of
from redrafter_mlx.drafting.files import recognition
from redrafter_mlx.drafting.files.drafter_files import DrafterFiles, Form, fill
from redrafter_mlx.drafting.files.tensor_names import eagle_name
from redrafter_mlx.drafting.interface import Features, Memory, Seen
from redrafter_mlx.drafting.level_drafter import (
    DraftLevels,
    IndependentLevels,
    shuffled,
)
from redrafter_mlx.drafting.published.blocks.config import other_readings, read_block
from redrafter_mlx.drafting.published.blocks.network import BlockNetwork
from redrafter_mlx.drafting.published.blocks.rows import BlockRows
from redrafter_mlx.drafting.published.network_config import of_network, read_vocabulary
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.target_model.model import Target

_B = TypeVar("_B", bound="BlockDrafter")


class BlockDrafter(CachedDrafter, well_formed=True):
    """A block network, with the target's embedding and output layer where it has none itself."""

    def __init__(
        self, name: str, network: BlockNetwork, target: Target, vocabulary: DraftVocabulary
    ) -> None:
        """Raise UnsupportedModelError for a rotary embedding that takes no node positions."""
        super().__init__(name, network, vocabulary)
        self._network, self._target, self.config = network, target, network.config
        self.rows = BlockRows(name, network, target, vocabulary)

    @property
    def scores_all(self) -> bool:
        return not self.config.own_head

    def within(self: _B, vocabulary: DraftVocabulary) -> _B:
        drafter, network = copy.copy(self), self._network.within(vocabulary)
        drafter.vocabulary, drafter._network, drafter._module = vocabulary, network, network
        drafter.rows = BlockRows(self._name, network, self._target, vocabulary)
        return drafter

    @property
    def features(self) -> Features:
        return Features(self.config.layers, every_position=True)

    @property
    def max_length(self) -> int:
        return self.config.drafts + 1

    @property
    def level_cost(self) -> float:
        """Bytes that a level reads, as a share of those that a target call reads.

        Of a block without a correction they are 0.
        """
        return self._network.level_bytes / nbytes_of(self._target.model)

    @property
    def block_cost(self) -> float:
        """Bytes that a block reads, as a share of those that a target call reads."""
        read = float(nbytes_of(self._network) - self._network.level_bytes)
        if self.config.own_embedding:
            read -= nbytes_of(self._network.embed_tokens)
        if not self.config.own_head:
            read += self._target.output_bytes * self.vocabulary.share
        return min(read / nbytes_of(self._target.model), 1.0)

    def readings(self) -> dict[str, BlockDrafter]:
        """Readings that correct known differences of files: layers, rotary scaling, first row."""
        return {
            words: self._with(self._network.changed(config))
            for words, config in other_readings(self.config, self._target.n_layers - 1).items()
        }

    def untrained(self) -> BlockDrafter:
        return self._with(shuffled(self._network))

    def new_cache(self) -> TreeCache:
        return TreeCache(self.config.n_layers)

    def append(self, seen: Seen, cache: TreeCache) -> None:
        self.rows.append(seen, cache)

    def uncompiled(self) -> BlockDrafter:
        drafter = copy.copy(self)
        drafter.rows = copy.copy(self.rows)
        drafter.rows.compiled = False
        return drafter

    def levels(self, memory: Memory, seen: Seen, drafts: int) -> DraftLevels:
        cache = self.filled_cache(memory)
        hidden = self.rows.call(seen, cache, drafts)
        return self.levels_of(hidden, seen.root, memory_of(cache))

    def levels_of(self, hidden: mx.array, root: mx.array, memory: Memory) -> DraftLevels:
        """Return the levels of the rows that predict, [B, drafts, H]."""
        del root
        logits = self.rows.logits(hidden)
        each = list(mx.split(logits, logits.shape[1], axis=1))
        return IndependentLevels(self.vocabulary, each, memory)

    def _with(self, network: BlockNetwork) -> BlockDrafter:
        return type(self)(self._name, network, self._target, self.vocabulary)


def load_dflash(files: DrafterFiles, target: Target) -> BlockDrafter:
    """Load the drafter, bound to its target; errors as in `Form.load`."""
    network = BlockNetwork(read_block(files, target, first_row=1))
    vocabulary = fill_block(network, files, target)
    return BlockDrafter(DFLASH.name, network, target, vocabulary)


def fill_block(network: BlockNetwork, files: DrafterFiles, target: Target) -> DraftVocabulary:
    """Fill the network from its files; return the tokens that it can draft."""
    stored, config = files.read(eagle_name), network.config
    vocabulary = read_vocabulary(config, stored, files)
    own = {name: array for name, array in stored.items() if of_network(name, config)}
    fill(network, own, files, target.dtype)
    return vocabulary


DFLASH = Form(recognition.DFLASH, load_dflash)
"""DFlash of its authors, JetSpec, and DFlash of speculators."""
