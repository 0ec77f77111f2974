"""Drafters that continue the target's features, with a KV cache of their own: EAGLE and MTP heads.

A row pairs the target's features at position i with the token at i + 1. Its output predicts the
token at i + 2, and replaces the features of the next row where the target has computed none yet.

The cache keeps rows of committed positions, with the target's true features. Rows of drafts, whose
features are the drafter's own guesses, follow them for one step only: keeping them would cost 8 to
15% of the accepted drafts (vLLM issue 14649).
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.drafting.cached_levels import CachedDrafter, CachedLevels, chain
from redrafter_mlx.drafting.interface import Features, Memory, Seen
from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.speculation.beam_search import select
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.adapter import with_node_positions
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.cache.layer_cache import AttentionCache, LayerCache
from redrafter_mlx.target_model.compiled import TreeCall
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.wrapped_layers import LinearView

_F = TypeVar("_F", bound="FeatureDrafter")


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """What a drafter reads of the target, and what it has itself.

    layers:       the target's layers whose inputs it reads, ascending; () if it reads the final
                  norm's output
    context_size: C, size of the features that it reads at each position
    n_layers:     number of decoder layers, each of which has a cache
    own_head:     whether it has an output layer of its own, `lm_head`
    own_embedding: whether it has a token embedding of its own, `embed_tokens`
    rope_scaling: of its rotary embedding, as config.json has it
    """

    layers: tuple[int, ...]
    context_size: int
    n_layers: int
    own_head: bool
    own_embedding: bool
    rope_scaling: Mapping[str, object] | None

    @property
    def rotations(self) -> int:
        """Number of rotary embeddings in its layers."""
        return self.n_layers


class FeatureNetwork(nn.Module):
    """The network of such a drafter.

    A row's context is what it reads in addition to the embedding of its token: the target's
    features after `fuse`, or the `feedback` of the previous row.
    """

    config: FeatureConfig

    @abstractmethod
    def fuse(self, features: mx.array) -> mx.array:
        """Map the target's features [B, N, C] to context."""

    @abstractmethod
    def forward(
        self, embedding: mx.array, context: mx.array, cache: Sequence[AttentionCache]
    ) -> mx.array:
        """Return [B, N, H], the output of each row before the final norm."""

    @abstractmethod
    def feedback(self, hidden: mx.array) -> mx.array:
        """Map outputs of rows to the context of the rows after them."""

    @abstractmethod
    def normed(self, hidden: mx.array) -> mx.array:
        """Map outputs of rows to the input of the output layer."""


class FeatureDrafter(CachedDrafter):
    """Such a network, with the target's embedding and output layer where it has none itself."""

    def __init__(
        self, name: str, network: FeatureNetwork, target: Target, vocabulary: DraftVocabulary
    ) -> None:
        """Raise UnsupportedModelError for a rotary embedding that takes no node positions."""
        config = network.config
        view, rotations, linears = with_node_positions(network)
        if rotations.count < config.rotations:
            raise UnsupportedModelError(
                f"{name}: drafts on a tree need another rotary scaling than {config.rope_scaling}"
            )
        super().__init__(name, network, vocabulary)
        self._target = target
        self.rows = FeatureRows(cast(FeatureNetwork, view), target, vocabulary, linears)

    @property
    def scores_all(self) -> bool:
        return not self.rows.network.config.own_head

    def within(self: _F, vocabulary: DraftVocabulary) -> _F:
        drafter = copy.copy(self)
        drafter.vocabulary, rows = vocabulary, self.rows
        drafter.rows = FeatureRows(rows.network, self._target, vocabulary, rows.linears)
        return drafter

    @property
    def features(self) -> Features:
        layers = self.rows.network.config.layers
        return Features(layers, hidden=not layers, every_position=True)

    @property
    def level_cost(self) -> float:
        """Bytes that one level reads, as a share of those that a target call reads."""
        config, read = self.rows.network.config, float(nbytes_of(self.module))
        if config.own_embedding:
            read -= nbytes_of(self.rows.network.embed_tokens)
        if not config.own_head:
            read += self._target.output_bytes * self.vocabulary.share
        return min(read / nbytes_of(self._target.model), 1.0)

    def new_cache(self) -> TreeCache:
        return TreeCache(self.rows.network.config.n_layers)

    def append(self, seen: Seen, cache: TreeCache) -> None:
        self.rows.run((seen.tokens[:, 1:], self.rows.context(seen)), cache.attention)

    def uncompiled(self) -> FeatureDrafter:
        drafter = copy.copy(self)
        drafter.rows = copy.copy(self.rows)
        drafter.rows.compiled = False
        return drafter

    def levels(self, memory: Memory, seen: Seen, drafts: int) -> FeatureLevels:
        del drafts
        return FeatureLevels(self.rows, self.filled_cache(memory), seen)


class FeatureRows:
    """Runs such a network on rows: pairs of a token and the context of the position before it.

    Shapes:
      tokens: [B, N] int32, context: [B, N, H]

    run:    (tokens, context) and the layers' caches -> the network's outputs [B, N, H]
    logits: outputs [B, N, H] -> [B, N, V'] float32
    """

    def __init__(
        self,
        network: FeatureNetwork,
        target: Target,
        vocabulary: DraftVocabulary,
        linears: Sequence[LinearView],
    ) -> None:
        """`linears`, of the network, are prepared when the first graph is compiled."""
        config = network.config
        embedding = network.embed_tokens if config.own_embedding else target.embedding
        head = network.lm_head if config.own_head else target.logits_of(vocabulary.rows)

        def run(row: tuple[mx.array, mx.array], cache: Sequence[LayerCache]) -> mx.array:
            tokens, context = row
            return network.forward(embedding(tokens).astype(context.dtype), context, cache)

        def logits(hidden: mx.array) -> mx.array:
            return head(network.normed(hidden)).astype(mx.float32)

        self.network, self.vocabulary, self.linears = network, vocabulary, linears
        self.run, self.logits = run, logits
        self.compiled = True
        self._call = TreeCall(run, logits, linears, partial(TreeCache, network.config.n_layers))

    def context(self, seen: Seen) -> mx.array:
        """Return what the network reads of committed positions besides tokens, [B, P, H]."""
        assert seen.features is not None, "a drafter reads what its `features` declare"
        return self.network.fuse(seen.features[..., : self.network.config.context_size])

    def call(
        self, tokens: mx.array, context: mx.array, cache: TreeCache
    ) -> tuple[mx.array, mx.array]:
        """Return the results of `run`, on a planned cache, and of `logits`, from one graph."""
        if self.compiled:
            return self._call((tokens, context), cache, True)
        hidden = self.run((tokens, context), cache.attention)
        return hidden, self.logits(hidden)


class FeatureLevels(CachedLevels):
    """The distribution after one root; see `DraftLevels`.

    The row with the root's token has the last committed position, so the first level of drafts has
    the root's position.
    """

    def __init__(self, rows: FeatureRows, cache: TreeCache, seen: Seen) -> None:
        super().__init__(rows.vocabulary, cache, seen, seen.root_position, seen.bound)
        self._rows = rows
        self._context = mx.array(0)  # [B, W, H], for rows that extend the last level's beams

    def first(self) -> mx.array:
        """Read positions committed since the last step; return logits [B, 1, V'] after the root."""
        seen, tokens = self._seen, self._seen.tokens[:, 1:]
        self._cache.plan_tree(chain(tokens), seen.position, seen.bound)
        hidden, _ = self._rows.call(tokens, self._rows.context(seen), self._cache)
        last = mx.maximum(seen.count - 1, 0)[:, None, None]
        at_root = mx.take_along_axis(hidden, last, axis=1)
        self._context = self._rows.network.feedback(at_root)
        return self._rows.logits(at_root)

    def following(self, parents: mx.array, tokens: mx.array) -> mx.array:
        """Return logits [B, W, V'] after tokens [B, W], which extend beams `parents` [B, W]."""
        self._plan(parents)
        hidden, logits = self._rows.call(tokens, select(self._context, parents), self._cache)
        self._context = self._rows.network.feedback(hidden)
        return logits
