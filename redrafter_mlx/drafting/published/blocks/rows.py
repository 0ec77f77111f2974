"""Runs a block network on committed positions and the block after them, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.drafting.interface import Seen
from redrafter_mlx.drafting.published.blocks.network import BlockNetwork
from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.speculation.constants import iota
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.adapter import with_node_positions
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.cache.layer_cache import LayerCache
from redrafter_mlx.target_model.cache.plans import SlotPlan, TreePlan
from redrafter_mlx.target_model.cache.slots import extent_of, planned_capacity
from redrafter_mlx.target_model.compiled import TreeCall
from redrafter_mlx.target_model.model import Target


class BlockRows:
    """Calls of a block network, with the target's embedding and output layer if it has none."""

    def __init__(
        self, name: str, network: BlockNetwork, target: Target, vocabulary: DraftVocabulary
    ) -> None:
        """Raise UnsupportedModelError for a rotary embedding that takes no node positions."""
        config = network.config
        view, rotations, linears = with_node_positions(network)
        if rotations.count < config.n_layers:
            raise UnsupportedModelError(
                f"{name}: a block needs another rotary scaling than {config.rope_scaling}"
            )
        self.network = at_positions = cast(BlockNetwork, view)
        self._config, self.compiled = config, True
        embedding: nn.Module = target.embedding
        scale = config.input_scale * embedding_scale(target)
        if config.own_embedding:
            embedding, scale = network.embed_tokens, config.input_scale
        self._head = network.lm_head if config.own_head else target.output_rows(vocabulary.rows)

        def run(rows: tuple[mx.array, mx.array], cache: Sequence[LayerCache]) -> mx.array:
            tokens, features = rows
            context = at_positions.context(features)
            block = embedding(tokens).astype(context.dtype)
            block = block if scale == 1 else block * scale
            return at_positions.forward(block, context, cache)

        self._run = run
        new_cache = partial(TreeCache, config.n_layers)
        self._call = TreeCall(run, lambda hidden: hidden, linears, new_cache)

    def append(self, seen: Seen, cache: TreeCache) -> None:
        """Append the context rows of committed positions, for which the cache is planned."""
        self.network.append(self.network.context(self._features(seen)), cache.attention)

    def call(self, seen: Seen, cache: TreeCache, drafts: int) -> mx.array:
        """Append the committed positions; return the rows of `drafts` drafts, [B, drafts, H]."""
        config, root = self._config, seen.root
        first = config.first_row
        n = first + drafts if config.causal else config.rows
        masked = mx.full((root.shape[0], n - 1), config.mask_token, mx.int32)
        rows = mx.concatenate([root[:, None], masked], axis=1), self._features(seen)
        cache.plan_call(block_plan(seen, n))
        hidden = self._call(rows, cache)[0] if self.compiled else self._run(rows, cache.attention)
        return hidden[:, first : first + drafts]

    def logits(self, hidden: mx.array) -> mx.array:
        """Map rows [B, n, H] to logits [B, n, V'] float32."""
        config = self._config
        logits = self._head(hidden).astype(mx.float32)
        logits = logits if config.output_scale == 1 else logits * config.output_scale
        cap = config.soft_cap
        return logits if cap is None else mx.tanh(logits / cap) * cap

    def _features(self, seen: Seen) -> mx.array:
        assert seen.features is not None, "a drafter reads what its `features` declare"
        return seen.features[..., : self._config.context_size]


def block_plan(seen: Seen, rows: int) -> TreePlan:
    """Plan a call on the committed positions and a block of `rows` rows after them.

    The block may attend to all positions before it and to itself. Committed positions after `count`
    do not exist: their rows are written after the block, where nothing is read. With one of two
    positions committed after three others, and a block of two rows:

        slots    0 1 2    3       4 5     6
        written           first   block   second
    """
    B, P = seen.tokens.shape[0], seen.tokens.shape[1] - 1
    root, position = seen.root_position[:, None], seen.position[:, None]
    committed, block = position + iota(P), root + iota(rows)
    slots = mx.where(iota(P) < seen.count[:, None], committed, root + rows + iota(P))
    extent = extent_of(seen.bound + rows)
    mask = mx.broadcast_to((iota(extent) < root + rows)[:, None, None], (B, 1, rows, extent))
    whole = SlotPlan(
        mask=mask[0, 0] if B == 1 else mask,
        slots=mx.concatenate([slots, block], axis=1)[:, None, :, None],
        moves=None,
        extent=extent,
        capacity=planned_capacity(seen.bound, P + rows),
    )
    return TreePlan(mx.concatenate([committed, block], axis=1), whole, keep=False)


def embedding_scale(target: Target) -> float:
    """Return the factor between a token's embedding and the input of the target's first layer."""
    token = mx.array([[1]])
    with target.lock:
        hidden = target.reading((0,)).append(token, target.new_cache(), 0)
        given = hidden[0, 0, : target.hidden_size].astype(mx.float32)
        own = target.embedding(token)[0, 0].astype(mx.float32)
        return cast(float, (mx.sum(given * own) / mx.sum(own * own)).item())
