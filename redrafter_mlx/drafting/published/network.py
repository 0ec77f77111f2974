"""Parts of the networks of published drafters, under their published names."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from redrafter_mlx.drafting.published.network_config import NetworkConfig, rope_of


class DrafterNetwork(nn.Module):
    """Decoder layers, and a token embedding and an output layer if they are not the target's."""

    def __init__(self, config: NetworkConfig, layer: Callable[[str], nn.Module]) -> None:
        """`layer` makes a decoder layer, whose tensors have that name as their prefix."""
        super().__init__()
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [layer(f"layers.{i}") for i in range(config.n_layers)]
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden_size, config.output_size, bias=False)


def share_weights(network: nn.Module, other: nn.Module) -> None:
    """Let a network use the weights of one of the same sizes, quantised ones too.

    Its norms and rotary embeddings stay modules of its own.
    """
    leaves = cast(
        "list[tuple[str, nn.Module]]",
        tree_flatten(other.leaf_modules(), is_leaf=nn.Module.is_module),
    )
    own = [
        (name, leaf)
        for name, leaf in leaves
        if not name.endswith(".rope") and not isinstance(leaf, nn.RMSNorm)
    ]
    network.update_modules(tree_unflatten(own))
    network.update(other.parameters())
    network.eval()


class Projections(nn.Module):
    """Queries, keys, values and output of one attention layer.

    Biases, the norms of queries and keys, and attention sinks exist if their tensors do.
    """

    def __init__(self, config: NetworkConfig, name: str, input_size: int) -> None:
        super().__init__()
        self._size = config.head_size
        queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size
        self.q_proj = nn.Linear(input_size, queries, config.has(f"{name}.q_proj.bias"))
        self.k_proj = nn.Linear(input_size, keys, config.has(f"{name}.k_proj.bias"))
        self.v_proj = nn.Linear(input_size, keys, config.has(f"{name}.v_proj.bias"))
        self.o_proj = nn.Linear(queries, config.hidden_size, config.has(f"{name}.o_proj.bias"))
        if config.has(f"{name}.q_norm.weight"):
            self.q_norm = nn.RMSNorm(config.head_size, config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_size, config.norm_eps)
        if config.has(f"{name}.attention_sink_bias"):
            self.attention_sink_bias = mx.zeros((config.heads,))
        self.rope = rope_of(config)

    def queries(self, x: mx.array, offset: int | mx.array) -> mx.array:
        """Return the queries [B, heads, N, head size] of rows [B, N, input size]."""
        queries = self._split(self.q_proj(x))
        queries = self.q_norm(queries) if "q_norm" in self else queries
        rotated: mx.array = self.rope(queries.swapaxes(1, 2), offset=offset)
        return rotated

    def keys_and_values(self, x: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values [B, K, N, head size] of rows [B, N, input size]."""
        keys, values = self._split(self.k_proj(x)), self._split(self.v_proj(x))
        keys = self.k_norm(keys) if "k_norm" in self else keys
        return self.rope(keys.swapaxes(1, 2), offset=offset), values.swapaxes(1, 2)

    def attended(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None
    ) -> mx.array:
        """Return the output [B, N, H] of queries that attend to keys and values by the mask."""
        read = mx.fast.scaled_dot_product_attention(
            queries,
            keys,
            values,
            scale=self._size**-0.5,
            mask=mask,
            sinks=self.get("attention_sink_bias"),
        )
        out: mx.array = self.o_proj(read.swapaxes(1, 2).reshape(*read.shape[:1], read.shape[2], -1))
        return out

    def _split(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], -1, self._size)
