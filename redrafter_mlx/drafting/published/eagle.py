"""EAGLE: one or two layers that continue the target's own features, with their own KV cache.

EAGLE-1 and 2 (Li et al., arXiv 2401.15077, 2406.16858) read the target's last hidden state, EAGLE-3
(arXiv 2503.01840) the inputs of a few of its layers. Beam search yields EAGLE-2's dynamic tree: the
likeliest nodes by the product of probabilities along their paths, within a budget. Its authors'
defaults (top_k 10, depth 7, total_token 60) are a beam width of 10, a beam length of 9 (the root
and 8 drafts) and 60 nodes. Here, a level has no more nodes than the beam is wide.

The cache keeps rows of committed positions, with the target's true features. Rows of drafts, whose
features are the drafter's own guesses, follow them for one step only: keeping them would cost 8 to
15% of the accepted drafts (vLLM issue 14649).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import mlx.core as mx

from redrafter_mlx.drafting import recognition
from redrafter_mlx.drafting.cached_levels import CachedDrafter, CachedLevels, chain
from redrafter_mlx.drafting.drafter_files import DrafterFiles, Form, fill
from redrafter_mlx.drafting.interface import Features, Memory, Seen
from redrafter_mlx.drafting.level_drafter import shuffled
from redrafter_mlx.drafting.published.eagle_config import read_eagle_one, read_eagle_three
from redrafter_mlx.drafting.published.eagle_network import (
    EagleNetwork,
    EagleOneNetwork,
    EagleThreeNetwork,
)
from redrafter_mlx.drafting.published.network_config import (
    ROPE_BASE,
    of_network,
    read_vocabulary,
    rope_kind,
)
from redrafter_mlx.drafting.recognition import eagle_name
from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.speculation.beam_search import select
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.adapter import find_head, with_node_positions
from redrafter_mlx.target_model.compiled import TreeCall
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.target_model.kv_cache import TreeCache
from redrafter_mlx.target_model.layer_cache import LayerCache
from redrafter_mlx.target_model.linear import LinearView
from redrafter_mlx.target_model.model import Target


class EagleDrafter(CachedDrafter, well_formed=True):
    """An EAGLE network, with the target's embedding and output layer where it has none itself."""

    def __init__(
        self, name: str, network: EagleNetwork, target: Target, vocabulary: DraftVocabulary
    ) -> None:
        """Raise UnsupportedModelError for a rotary embedding that takes no node positions."""
        config = network.config
        view, rotations, linears = with_node_positions(network)
        if rotations.count < config.n_layers:
            raise UnsupportedModelError(
                f"{name}: drafts on a tree need another rotary scaling than {config.rope_scaling}"
            )
        super().__init__(name, network, vocabulary)
        self._network, self._target, self.config = network, target, config
        self.rows = EagleRows(cast(EagleNetwork, view), target, vocabulary, linears)

    @property
    def features(self) -> Features:
        layers = self.config.layers
        return Features(layers, hidden=not layers, every_position=True)

    @property
    def level_cost(self) -> float:
        """Bytes that one level reads, as a share of those that a target call reads."""
        read = nbytes_of(self._network)
        if self.config.own_embedding:
            read -= nbytes_of(self._network.embed_tokens)
        if not self.config.own_head:
            read += nbytes_of(find_head(self._target.model) or self._target.embedding)
        return min(read / nbytes_of(self._target.model), 1.0)

    def readings(self) -> dict[str, EagleDrafter]:
        """Readings that correct known errors of files: layers, rotary embedding, norms.

        Early trainers rotated with a base of 10000, and without Llama 3's scaling, whatever
        config.json said. Some wrote norm_output for a head that feeds back its output as it is.
        """
        config, last = self.config, self._target.n_layers - 1
        changed = {}
        if config.rope_base != ROPE_BASE:
            scaling = None if rope_kind(config.rope_scaling) == "llama3" else config.rope_scaling
            changed["a rotary base of 10000"] = replace(
                config, rope_base=ROPE_BASE, rope_scaling=scaling
            )
        for step, words in ((-1, "layers one earlier"), (1, "layers one later")):
            layers = tuple(layer + step for layer in config.layers)
            if layers and layers[0] >= 0 and layers[-1] <= last:
                changed[words] = replace(config, layers=layers)
        if config.layers:
            other = not config.norm_before_residual
            words = f"norm_before_residual {str(other).lower()}"
            changed[words] = replace(config, norm_before_residual=other)
        if config.norm_output:
            changed["norm_output false"] = replace(config, norm_output=False)
        network = self._network
        return {
            words: EagleDrafter(self._name, network.changed(config), self._target, self.vocabulary)
            for words, config in changed.items()
        }

    def untrained(self) -> EagleDrafter:
        network = shuffled(self._network)
        return EagleDrafter(self._name, network, self._target, self.vocabulary)

    def new_cache(self) -> TreeCache:
        return TreeCache(self.config.n_layers)

    def append(self, seen: Seen, cache: TreeCache) -> None:
        self.rows.run((seen.tokens[:, 1:], self.rows.context(seen)), cache.attention)

    def uncompiled(self) -> EagleDrafter:
        drafter = copy.copy(self)
        drafter.rows = copy.copy(self.rows)
        drafter.rows.compiled = False
        return drafter

    def levels(self, memory: Memory, seen: Seen, drafts: int) -> EagleLevels:
        del drafts
        return EagleLevels(self.rows, self.filled_cache(memory), seen)


class EagleRows:
    """Runs an EAGLE network on rows: pairs of a token and the context of the position before it.

    Shapes:
      tokens: [B, N] int32, context: [B, N, H]

    run:    (tokens, context) and the layers' caches -> the network's outputs [B, N, H]
    logits: outputs [B, N, H] -> [B, N, V'] float32
    """

    def __init__(
        self,
        network: EagleNetwork,
        target: Target,
        vocabulary: DraftVocabulary,
        linears: Sequence[LinearView],
    ) -> None:
        """`linears`, of the network, are prepared when the first graph is compiled."""
        config = network.config
        embedding = network.embed_tokens if config.own_embedding else target.embedding
        head = network.lm_head if config.own_head else target.logits

        def run(row: tuple[mx.array, mx.array], cache: Sequence[LayerCache]) -> mx.array:
            tokens, context = row
            return network.forward(embedding(tokens).astype(context.dtype), context, cache)

        def logits(hidden: mx.array) -> mx.array:
            return head(network.normed(hidden)).astype(mx.float32)

        self.network, self.vocabulary = network, vocabulary
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


class EagleLevels(CachedLevels):
    """An EAGLE drafter's distribution after one root; see `DraftLevels`.

    The row with the root's token has the last committed position, so the first level of drafts has
    the root's position.
    """

    def __init__(self, rows: EagleRows, cache: TreeCache, seen: Seen) -> None:
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


def load_eagle_one(files: DrafterFiles, target: Target) -> EagleDrafter:
    config = read_eagle_one(files, target)
    return _load(EAGLE.name, files, target, EagleOneNetwork(config))


def load_eagle_three(files: DrafterFiles, target: Target) -> EagleDrafter:
    config = read_eagle_three(files, target)
    return _load(EAGLE3.name, files, target, EagleThreeNetwork(config))


def _load(name: str, files: DrafterFiles, target: Target, network: EagleNetwork) -> EagleDrafter:
    """Load the drafter from its files; DamagedFileError names what they lack."""
    stored = files.read(eagle_name)
    vocabulary = read_vocabulary(network.config, stored, files)
    own = {n: array for n, array in stored.items() if of_network(n, network.config)}
    fill(network, own, files, target.dtype)
    return EagleDrafter(name, network, target, vocabulary)


EAGLE3 = Form(recognition.EAGLE3, load_eagle_three)
EAGLE = Form(recognition.EAGLE, load_eagle_one)
