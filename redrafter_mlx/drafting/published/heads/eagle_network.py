"""The networks of EAGLE drafters: one or a few Llama layers between features and an output layer.

EAGLE-1 and 2 (arXiv 2401.15077, 2406.16858) and EAGLE-3 (arXiv 2503.01840) have the same structure.
Parameter names are those of the published files.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.llama import MLP

from redrafter_mlx.drafting.published.heads.eagle_config import EagleConfig
from redrafter_mlx.drafting.published.heads.feature_drafter import FeatureNetwork
from redrafter_mlx.drafting.published.network import DrafterNetwork, Projections, share_weights
from redrafter_mlx.target_model.cache.layer_cache import AttentionCache


class Attention(Projections):
    """Llama's attention over rows [B, N, input size]."""

    def __init__(self, config: EagleConfig, name: str, input_size: int) -> None:
        super().__init__(config, name, input_size)
        self._window = config.window

    def __call__(self, x: mx.array, cache: AttentionCache) -> mx.array:
        """Return [B, N, H]; positions and mask of the rows come from the cache."""
        queries = self.queries(x, cache.offset)
        keys, values = cache.update_and_fetch(*self.keys_and_values(x, cache.offset))
        window = {} if self._window is None else {"window_size": self._window}
        mask = cache.make_mask(x.shape[1], **window)
        return self.attended(queries, keys, values, mask)


class DecoderLayer(nn.Module):
    """A Llama layer; in EAGLE-3 its attention reads the token's embedding joined with its input.

    The first layer of EAGLE-1 and 2 has no input norm.
    """

    def __init__(self, config: EagleConfig, name: str) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.norm_eps
        self._normed_residual = config.norm_before_residual
        if config.has(f"{name}.hidden_norm.weight"):
            self.hidden_norm = nn.RMSNorm(H, eps)
        if "hidden_norm" in self or config.has(f"{name}.input_layernorm.weight"):
            self.input_layernorm = nn.RMSNorm(H, eps)
        input_size = 2 * H if "hidden_norm" in self else H
        self.self_attn = Attention(config, f"{name}.self_attn", input_size)
        self.post_attention_layernorm = nn.RMSNorm(H, eps)
        self.mlp = MLP(config)

    def __call__(self, x: mx.array, embedding: mx.array, cache: AttentionCache) -> mx.array:
        """Return [B, N, H], from the input and the embeddings of the same shape."""
        inner = x
        if "hidden_norm" in self:
            normed = self.hidden_norm(x)
            inner = mx.concatenate([self.input_layernorm(embedding), normed], axis=-1)
            x = normed if self._normed_residual else x
        elif "input_layernorm" in self:
            inner = self.input_layernorm(x)
        x = x + self.self_attn(inner, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleNetwork(DrafterNetwork, FeatureNetwork):
    """What both forms have in common."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, lambda name: DecoderLayer(config, name))
        self.config: EagleConfig = config

    def changed(self, config: EagleConfig) -> EagleNetwork:
        """Return a network with the same weights and another configuration."""
        network = type(self)(config)
        share_weights(network, self)
        return network

    def feedback(self, hidden: mx.array) -> mx.array:
        return hidden

    def normed(self, hidden: mx.array) -> mx.array:
        return hidden

    def _through_layers(
        self, x: mx.array, embedding: mx.array, cache: Sequence[AttentionCache]
    ) -> mx.array:
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer(x, embedding, layer_cache)
        return x


class EagleOneNetwork(EagleNetwork):
    """EAGLE-1 and 2: fc joins the embedding with the target's last hidden state, no final norm."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        H = config.hidden_size
        self.fc = nn.Linear(2 * H, H, config.has("fc.bias"))

    def fuse(self, features: mx.array) -> mx.array:
        return features

    def forward(
        self, embedding: mx.array, context: mx.array, cache: Sequence[AttentionCache]
    ) -> mx.array:
        joined = self.fc(mx.concatenate([embedding, context], axis=-1))
        return self._through_layers(joined, embedding, cache)


class EagleThreeNetwork(EagleNetwork):
    """EAGLE-3: fc fuses the inputs of a few of the target's layers; the output is fed back.

    "EAGLE 3.1" (arXiv 2605.09992) adds a norm of each part before fc, and normalises the output
    that is fed back.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        H, width = config.hidden_size, config.context_size
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(width, config.norm_eps)
        if config.fc_norm:
            part = width // len(config.layers)
            self.fc_norm = [nn.RMSNorm(part, config.norm_eps) for _ in config.layers]
        self.fc = nn.Linear(width, H, config.has("fc.bias"))
        self.norm = nn.RMSNorm(H, config.norm_eps)

    def fuse(self, features: mx.array) -> mx.array:
        if "input_norm" in self:
            features = self.input_norm(features)
        if "fc_norm" in self:
            parts = mx.split(features, len(self.fc_norm), axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = mx.concatenate(normed, axis=-1)
        fused: mx.array = self.fc(features)
        return fused

    def forward(
        self, embedding: mx.array, context: mx.array, cache: Sequence[AttentionCache]
    ) -> mx.array:
        return self._through_layers(context, embedding, cache)

    def feedback(self, hidden: mx.array) -> mx.array:
        return self.normed(hidden) if self.config.norm_output else hidden

    def normed(self, hidden: mx.array) -> mx.array:
        out: mx.array = self.norm(hidden)
        return out
