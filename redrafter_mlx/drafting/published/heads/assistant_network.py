"""The network of Gemma 4's assistants: layers of queries alone, over the target's keys and values.

    x       = pre_projection [ E(t) s ; h ]          E the target's embedding, s its scale
    layers  : Gemma 4's, whose attention reads the target's keys and values of committed positions,
              those of its last layer of the same type; all rows at one position
    logits  = E' norm(x)                             E' the assistant's embedding, or a part of it
    next h  = post_projection norm(x)

Of the smallest assistants, E' is read in part: the tokens of those centroids that score highest.
Parameter names are those of the published files.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma4_text import DecoderLayer

from redrafter_mlx.drafting.published.heads.assistant_config import SLIDING, AssistantConfig
from redrafter_mlx.target_model.cache.slots import Committed


class Centroids(nn.Module):
    """An output layer that scores the tokens of a few centroids alone.

    token_ordering: [V'] int32, the tokens of each centroid in turn
    """

    def __init__(self, hidden_size: int, vocab_size: int, count: int, chosen: int) -> None:
        super().__init__()
        self.centroids = nn.Linear(hidden_size, count, bias=False)
        self.token_ordering = mx.zeros((vocab_size,), mx.int32)
        self._chosen = chosen

    def __call__(self, hidden: mx.array, embedding: nn.Embedding) -> mx.array:
        """Map hidden [B, W, H] to logits [B, W, V'] float32, -inf where no centroid was chosen."""
        scores = self.centroids(hidden)
        best = mx.argpartition(-scores, kth=self._chosen - 1, axis=-1)[..., : self._chosen]
        of_centroid = self.token_ordering.reshape(scores.shape[-1], -1)
        tokens = of_centroid[best].reshape(*hidden.shape[:2], -1)  # [B, W, candidates]
        logits = (embedding(tokens) @ hidden[..., None])[..., 0].astype(mx.float32)
        everything = mx.full((*hidden.shape[:2], self.token_ordering.size), -mx.inf)
        return mx.put_along_axis(everything, tokens, logits, axis=-1)


class AssistantNetwork(nn.Module):
    """An assistant; `model` holds what its files have below that prefix."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.config, args = config, config.args
        H, V, D = args.hidden_size, args.vocab_size, config.backbone_size
        self.embed_tokens = nn.Embedding(V, H)
        self.layers = [DecoderLayer(args, i) for i in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(H, args.rms_norm_eps)
        self.pre_projection = nn.Linear(2 * D, H, bias=False)
        self.post_projection = nn.Linear(H, D, bias=False)
        if config.centroids is not None:
            self.masked_embedding = Centroids(H, V, *config.centroids)
        elif config.own_head:
            self.lm_head = nn.Linear(H, V, bias=False)

    def level(
        self, embedded: mx.array, context: mx.array, read: Committed, ahead: int
    ) -> tuple[mx.array, mx.array]:
        """Return logits [B, W, V'] float32 of a level's nodes, and what their children read.

        Shapes:
          embedded: [B, W, D], the nodes' tokens by the target's embedding, scaled
          context:  [B, W, D], the target's last hidden state, or that of the parents' level

        ahead: how far the rows' position is from the last committed one
        """
        args, (B, W, _) = self.config.args, embedded.shape
        newest = mx.max(read.positions[0], axis=1, keepdims=True)  # [B, 1]
        offset = mx.broadcast_to(newest + ahead, (B, W))
        x = self.pre_projection(mx.concatenate([embedded.astype(context.dtype), context], axis=-1))
        order = sorted({*self.config.caches})
        for layer, cache in zip(self.layers, self.config.caches, strict=True):
            at = order.index(cache)
            shared, positions = (read.keys[at], read.values[at]), read.positions[at]
            seen = positions >= 0
            if layer.layer_type == SLIDING:
                seen = seen & (positions > newest - args.sliding_window)
            x, _, _ = layer(x, _for_rows(seen, W), shared_kv=shared, offset=offset)
        hidden = self.norm(x)
        return self._logits(hidden), self.post_projection(hidden)

    def _logits(self, hidden: mx.array) -> mx.array:
        if "masked_embedding" in self:
            scored: mx.array = self.masked_embedding(hidden, self.embed_tokens)
            return scored
        head = self.lm_head if "lm_head" in self else self.embed_tokens.as_linear
        out: mx.array = head(hidden).astype(mx.float32)
        return out


def _for_rows(seen: mx.array, rows: int) -> mx.array:
    """Return the mask of `rows` query rows that all see these slots [B, S]."""
    B, S = seen.shape
    return (
        mx.broadcast_to(seen, (rows, S))
        if B == 1
        else mx.broadcast_to(seen[:, None, None], (B, 1, rows, S))
    )
