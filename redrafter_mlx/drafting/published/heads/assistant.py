"""Gemma 4's assistants: drafters without a memory, which attend to the target's own keys.

Google publishes one for each size of Gemma 4 (`model_type` gemma4_assistant). A level of a tree is
one call on all its nodes; `assistant_network.py` has the equations. Nothing is kept from step to
step, so nothing has to be rolled back, and a prompt costs nothing.

All rows are at one position. mlx-vlm takes the last committed one and transformers the root's;
calibration compares them.
"""

from __future__ import annotations

import copy
from typing import cast

import mlx.core as mx

from redrafter_mlx.drafting.files import recognition
from redrafter_mlx.drafting.files.drafter_files import (
    DrafterFiles,
    Form,
    check_tokens,
    fill,
)
from redrafter_mlx.drafting.files.tensor_names import eagle_name
from redrafter_mlx.drafting.interface import Features, Memory, Seen
from redrafter_mlx.drafting.level_drafter import DraftLevels, LevelDrafter, shuffled
from redrafter_mlx.drafting.published.blocks.rows import embedding_scale
from redrafter_mlx.drafting.published.heads.assistant_config import read_assistant
from redrafter_mlx.drafting.published.heads.assistant_network import AssistantNetwork
from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.speculation.beam_search import select
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.adapter import with_node_positions
from redrafter_mlx.target_model.cache.slots import Committed
from redrafter_mlx.target_model.compiled import CompiledGraphs
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.target_model.model import Target

_ORDER = "masked_embedding.token_ordering"

_LAST, _ROOT = 0, 1
"""Positions of the rows, counted from the last committed one."""


class AssistantDrafter(LevelDrafter, well_formed=True):
    """An assistant, with the target's embedding."""

    def __init__(
        self, network: AssistantNetwork, target: Target, scale: float, ahead: int = _LAST
    ) -> None:
        """`scale` is that of the target's embedding, `ahead` the position of the rows."""
        vocabulary = DraftVocabulary(network.config.args.vocab_size, target.vocab_size)
        super().__init__(ASSISTANT.name, network, vocabulary)
        self._network, self._target, self._scale = network, target, scale
        view, rotations, _ = with_node_positions(network)
        if rotations.count < len(network.layers):
            raise UnsupportedModelError(
                f"{ASSISTANT.name}: drafts on a tree need another rotary scaling than "
                f"{network.config.args.rope_parameters}"
            )
        at_positions, embedding = cast(AssistantNetwork, view), target.embedding

        def level(
            tokens: mx.array, context: mx.array, read: tuple[object, ...]
        ) -> tuple[mx.array, mx.array]:
            embedded = embedding(tokens) * scale
            return at_positions.level(embedded, context, Committed(*read), ahead)  # type: ignore[arg-type]

        self._level, self._graphs, self._compiled = level, CompiledGraphs(level), True

    @property
    def features(self) -> Features:
        return Features(hidden=True, caches=tuple(sorted({*self._network.config.caches})))

    @property
    def level_cost(self) -> float:
        """Bytes that one level reads, without keys, as a share of those of a target call."""
        config = self._network.config
        read = nbytes_of(self._network)
        if config.centroids is not None:  # a share of the embedding
            count, chosen = config.centroids
            read -= nbytes_of(self._network.embed_tokens) * (count - chosen) // count
        elif config.own_head:
            read -= nbytes_of(self._network.embed_tokens)
        return min(read / nbytes_of(self._target.model), 1.0)

    def readings(self) -> dict[str, AssistantDrafter]:
        """The reading of transformers; see the module's documentation."""
        drafter = AssistantDrafter(self._network, self._target, self._scale, _ROOT)
        return {"its rows at the root's position": drafter}

    def untrained(self) -> AssistantDrafter:
        return AssistantDrafter(shuffled(self._network), self._target, self._scale)

    def uncompiled(self) -> AssistantDrafter:
        drafter = copy.copy(self)
        drafter._compiled = False
        return drafter

    def levels(self, memory: Memory, seen: Seen, drafts: int) -> AssistantLevels:
        del memory, drafts
        return AssistantLevels(self, seen)

    def call(
        self, tokens: mx.array, context: mx.array, read: Committed
    ) -> tuple[mx.array, mx.array]:
        """Return the results of `AssistantNetwork.level` for tokens [B, W]."""
        if not self._compiled:
            return self._level(tokens, context, tuple(read))
        sizes = tokens.shape, *(a.shape for a in (*read.positions, *read.keys, *read.values))
        return self._graphs.call(sizes, tokens, context, tuple(read))


class AssistantLevels(DraftLevels):
    """The distribution after one root; see `DraftLevels`."""

    def __init__(self, drafter: AssistantDrafter, seen: Seen) -> None:
        super().__init__(drafter.vocabulary)
        assert seen.committed is not None, "a drafter reads what its `features` declare"
        self._drafter, self._root, self._read = drafter, seen.root, seen.committed
        self._context = seen.newest[:, None]  # [B, W, D], for rows that extend the last beams

    def first(self) -> mx.array:
        logits, self._context = self._drafter.call(self._root[:, None], self._context, self._read)
        return logits

    def following(self, parents: mx.array, tokens: mx.array) -> mx.array:
        context = select(self._context, parents)
        logits, self._context = self._drafter.call(tokens, context, self._read)
        return logits


def load_assistant(files: DrafterFiles, target: Target) -> AssistantDrafter:
    """Load the drafter, bound to its target; errors as in `Form.load`."""
    config = read_assistant(files, target)
    network = AssistantNetwork(config)
    own = files.read(eagle_name)
    if not config.own_head:
        own.pop("lm_head.weight", None)  # a copy of the embedding
    order = own.get(_ORDER)
    if config.centroids is not None and order is not None:
        check_tokens(order, _ORDER, config.args.vocab_size, files.tensors.path)
        own[_ORDER] = order.astype(mx.int32)
    fill(network, own, files, target.dtype)
    return AssistantDrafter(network, target, embedding_scale(target))


ASSISTANT = Form(recognition.ASSISTANT, load_assistant)
"""The assistants of Gemma 4, in the layout of transformers."""
