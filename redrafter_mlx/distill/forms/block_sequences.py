"""A block drafter along whole texts: the block after each position, all in one call.

The block of a position reads the context rows up to it, and itself. In training all positions of a
text share their context rows, so attention is computed in two parts: over the context of the text,
by a mask, and over the rows of each block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx

from redrafter_mlx.distill.forms.eagle_sequences import Sequences
from redrafter_mlx.drafting.published.blocks.config import Sight
from redrafter_mlx.drafting.published.blocks.network import BlockLayer, BlockNetwork
from redrafter_mlx.speculation.constants import iota


def blocks_along(
    network: BlockNetwork, embed: Callable[[mx.array], mx.array], batch: Sequences
) -> list[mx.array]:
    """Return the normed rows [M, H] of the blocks after `batch.rows`, one array for each row.

    embed: maps tokens to their scaled embeddings
    """
    config, features = network.config, batch.features.astype(mx.float32)
    B, S, _ = features.shape
    T, H = config.rows, config.hidden_size
    context = network.context(features)
    roots = batch.tokens[:, None, 1 : 1 + S]
    masked = mx.full((B, T - 1, S), config.mask_token, mx.int32)
    tokens = mx.concatenate([roots, masked], axis=1)  # [B, T, S]
    x = embed(tokens).astype(mx.float32).reshape(B * T, S, H)
    offset = mx.broadcast_to(1 + iota(T), (B, T)).reshape(-1)  # of a block's row t at position 0
    layers = cast("list[BlockLayer]", network.layers)
    for layer, sight in zip(layers, config.sights, strict=True):
        x = x + _attention(layer, layer.input_layernorm(x), context, offset, sight)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    rows = network.norm(x).reshape(B, T, S, H).swapaxes(0, 1).reshape(T, B * S, H)
    return [row[0] for row in mx.split(rows[:, batch.rows], T)]


def _attention(
    layer: BlockLayer, inner: mx.array, context: mx.array, offset: mx.array, sight: Sight
) -> mx.array:
    """Return the attention's output [B * T, S, H] of the blocks' normed rows.

    Shapes:
      inner:   [B * T, S, H], row t of the block after position i at [b * T + t, i]
      context: [B, S, H]
      offset:  [B * T] int32, the rotary position at i = 0
    """
    attention = layer.self_attn
    B, S, _ = context.shape
    T = inner.shape[0] // B
    queries = attention.queries(inner, offset)
    keys, values = attention.keys_and_values(inner, offset)
    shared_keys, shared_values = attention.keys_and_values(context, 0)
    K, d = keys.shape[1], keys.shape[3]
    G = queries.shape[1] // K
    queries = queries.reshape(B, T, K, G, S, d).transpose(0, 2, 1, 3, 4, 5) * d**-0.5
    seen, within = _masks(S, T, sight)  # [T, 1, S, S], [T, 1, 1, T]

    to_context = queries.reshape(B, K, T * G * S, d) @ shared_keys.swapaxes(-1, -2)
    to_context = mx.where(seen, to_context.reshape(B, K, T, G, S, S), -mx.inf)
    by_position = queries.transpose(0, 1, 4, 2, 3, 5).reshape(B, K, S, T * G, d)
    own_keys = keys.reshape(B, T, K, S, d).transpose(0, 2, 3, 4, 1)
    to_block = (by_position @ own_keys).reshape(B, K, S, T, G, T).transpose(0, 1, 3, 4, 2, 5)
    to_block = mx.where(within, to_block, -mx.inf)

    weights = mx.softmax(mx.concatenate([to_context, to_block], axis=-1), axis=-1)
    of_context, of_block = weights[..., :S], weights[..., S:]
    read = of_context.reshape(B, K, T * G * S, S) @ shared_values
    own_values = values.reshape(B, T, K, S, d).transpose(0, 2, 3, 1, 4)
    of_block = of_block.transpose(0, 1, 4, 2, 3, 5).reshape(B, K, S, T * G, T)
    own = (of_block @ own_values).reshape(B, K, S, T, G, d).transpose(0, 1, 3, 4, 2, 5)
    both = read.reshape(B, K, T, G, S, d) + own
    out: mx.array = attention.o_proj(both.transpose(0, 2, 4, 1, 3, 5).reshape(B * T, S, -1))
    return out


def _masks(positions: int, rows: int, sight: Sight) -> tuple[mx.array, mx.array]:
    """Return which context rows each block row sees [T, 1, S, S], and which of its block's."""
    at, context = iota(positions)[:, None], iota(positions)
    row = iota(rows)[:, None, None, None]
    seen = (context <= at) & (context > at + 1 + row - sight.window)
    within = iota(rows) <= row if sight.causal else mx.ones((rows, 1, 1, rows), mx.bool_)
    return seen, within
