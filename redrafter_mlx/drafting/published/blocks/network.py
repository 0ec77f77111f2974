"""The network of block drafters: decoder layers that read a block of mask tokens at once.

Chen et al. (DFlash, arXiv 2602.06036). With h_p the outputs of a few of the target's layers at
position p, all layers read the same context row c_p, with projections of their own:

    c_p = hidden_norm(fc h_p)      K_p = rope_p(k_norm(k_proj c_p))      V_p = v_proj c_p

They are computed once for each position. A block is the root and mask tokens after it, at the next
positions. Its rows go through the layers, which are Qwen3's; they attend to the context and to one
another. Parameter names are those of the published files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.llama import MLP

from redrafter_mlx.drafting.published.blocks.config import BlockConfig
from redrafter_mlx.drafting.published.network import DrafterNetwork, Projections, share_weights
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.cache.layer_cache import AttentionCache


class BlockLayer(nn.Module):
    """A Qwen3 layer whose rows attend to context rows too."""

    def __init__(self, config: BlockConfig, name: str) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = nn.RMSNorm(H, eps)
        self.self_attn = Projections(config, f"{name}.self_attn", H)
        self.post_attention_layernorm = nn.RMSNorm(H, eps)
        self.mlp = MLP(config)

    def append(self, context: mx.array, cache: AttentionCache) -> None:
        """Write the keys and values of context rows [B, P, H]."""
        cache.update_and_fetch(*self.self_attn.keys_and_values(context, cache.offset))

    def attention(
        self, inner: mx.array, context: mx.array, mask: mx.array, cache: AttentionCache
    ) -> mx.array:
        """Return the attention's output [B, n, H] of the block's normed rows.

        Their keys and values are written after the context's. Those of both are computed in one
        call, which reads the matrices once.
        """
        positions = cache.offset
        assert isinstance(positions, mx.array)
        rows = mx.concatenate([context, inner], axis=1)
        keys, values = cache.update_and_fetch(*self.self_attn.keys_and_values(rows, positions))
        queries = self.self_attn.queries(inner, positions[:, -inner.shape[1] :])
        return self.self_attn.attended(queries, keys, values, mask)

    def __call__(
        self, x: mx.array, context: mx.array, mask: mx.array, cache: AttentionCache
    ) -> mx.array:
        """Return the block's rows [B, n, H]."""
        x = x + self.attention(self.input_layernorm(x), context, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockNetwork(DrafterNetwork):
    """The context rows' projection, the layers, and the norm after them."""

    def __init__(
        self, config: BlockConfig, layer: Callable[[str], nn.Module] | None = None
    ) -> None:
        """`layer` as in `DrafterNetwork`; by default a `BlockLayer`."""
        super().__init__(config, layer or (lambda name: BlockLayer(config, name)))
        H, eps = config.hidden_size, config.norm_eps
        self.config = config
        self.fc = nn.Linear(config.context_size, H, config.has("fc.bias"))
        self.hidden_norm = nn.RMSNorm(H, eps)
        self.norm = nn.RMSNorm(H, eps)

    @property
    def level_bytes(self) -> int:
        """Bytes that are read for each level of a tree, not once for all."""
        return 0

    def within(self, vocabulary: DraftVocabulary) -> BlockNetwork:
        """Return the network for these outputs of the target's output layer alone."""
        del vocabulary
        return self

    def changed(self, config: BlockConfig) -> BlockNetwork:
        """Return a network with the same weights and another configuration."""
        network = type(self)(config)
        share_weights(network, self)
        return network

    def context(self, features: mx.array) -> mx.array:
        """Map the target's features [B, P, C] to context rows [B, P, H]."""
        rows: mx.array = self.hidden_norm(self.fc(features))
        return rows

    def append(self, context: mx.array, cache: Sequence[AttentionCache]) -> None:
        """Write the keys and values of context rows [B, P, H] in all layers."""
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            layer.append(context, layer_cache)

    def forward(self, x: mx.array, context: mx.array, cache: Sequence[AttentionCache]) -> mx.array:
        """Return the normed rows [B, n, H] of a block `x`, on caches planned by `block_plan`."""
        n, positions = x.shape[1], cache[0].offset
        everything = cache[0].make_mask(n)
        assert isinstance(positions, mx.array)
        assert isinstance(everything, mx.array)
        masks = {
            sight: sight.of(everything, positions[:, -n:])
            for sight in dict.fromkeys(self.config.sights)
        }
        for layer, sight, layer_cache in zip(self.layers, self.config.sights, cache, strict=True):
            x = layer(x, context, masks[sight], layer_cache)
        normed: mx.array = self.norm(x)
        return normed
