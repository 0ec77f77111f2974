"""The drafter: a small recurrent head that guesses ahead from the target's last hidden state.

Paper, section 3.1: s' = silu(W e + U s + b) over the target's own token embeddings, then residual
blocks over [context, s'] and an output layer. Parameter names are those of the paper's code, so
a folder of its weights loads as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.config import (
    BeamShape,
    SamplingParams,
)
from redrafter_mlx.drafting.interface import DraftInput
from redrafter_mlx.drafting.recurrent_config import DrafterConfig, check_target
from redrafter_mlx.speculation.beam_search import beam_search
from redrafter_mlx.speculation.rejection import SampledDrafts, draw_drafts
from redrafter_mlx.speculation.tree import Beams
from redrafter_mlx.target.model import Target


class ResidualBlock(nn.Module):
    """x + silu(linear(x)) over [..., E]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def __call__(self, x: mx.array) -> mx.array:
        return x + nn.silu(self.linear(x))


class Drafter(nn.Module):
    """The drafter's own parameters; `bind` joins them with a target's tables."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        D, E = config.hidden_size, config.exit_dim
        if config.context_layers:
            self.context_scale = mx.ones((config.context_size,))
            self.freeze(recurse=False, keys=["context_scale"])  # it comes from the corpus
            self.context_proj = nn.Linear(config.context_size, D)
        if 2 * D != E:
            self.input_proj = nn.Linear(2 * D, E)
        blocks: list[nn.Module] = [ResidualBlock(E) for _ in range(config.num_draft_layers)]
        if config.head == "own":
            blocks.append(nn.Linear(E, config.output_size, bias=False))
        else:
            if E != D:
                self.output_proj = nn.Linear(E, D, bias=False)
            self.output_norm = nn.RMSNorm(D)
        self.lm_head = blocks
        if config.rnn:
            self.rnn_u = nn.Linear(D, D)
            self.rnn_w = nn.Linear(D, D, bias=False)
        if config.draft_vocab_size is not None:
            self.draft_vocab = mx.arange(config.draft_vocab_size)
            self.freeze(recurse=False, keys=["draft_vocab"])

    @classmethod
    def fresh(cls, config: DrafterConfig, seed: int) -> Drafter:
        """An untrained one: linear layers as mlx.nn draws them, but from a key of their own."""
        drafter = cls(config)
        layers = [m for _, m in sorted(drafter.named_modules()) if isinstance(m, nn.Linear)]
        keys = mx.random.split(mx.random.key(seed), 2 * len(layers))
        for layer, (for_weight, for_bias) in zip(layers, keys.reshape(-1, 2, 2), strict=True):
            bound = layer.weight.shape[1] ** -0.5
            layer.weight = mx.random.uniform(-bound, bound, layer.weight.shape, key=for_weight)
            if "bias" in layer:
                layer.bias = mx.random.uniform(-bound, bound, layer.bias.shape, key=for_bias)
        return drafter

    @classmethod
    def stored_as(cls, config: DrafterConfig) -> Drafter:
        """With weights to be replaced, quantised where the config says that its file is."""
        return cls(config)._quantised()

    def untrained(self, dtype: mx.Dtype, seed: int = 0) -> Drafter:
        """One of the same form, draft vocabulary and cost that has learnt nothing."""
        fresh = Drafter.fresh(self.config, seed)._quantised()
        if self.config.draft_vocab_size is not None:
            fresh.draft_vocab = self.draft_vocab
        if self.config.context_layers:
            fresh.context_scale = self.context_scale
        fresh.set_dtype(dtype)
        fresh.eval()
        return fresh

    def _quantised(self) -> Drafter:
        """Itself, quantised where its config says so."""
        config = self.config
        if config.bits is not None and config.group_size is not None:
            nn.quantize(self, group_size=config.group_size, bits=config.bits)
        return self

    def read(self, context: mx.array) -> mx.array:
        """The target's hidden states [..., C] as what drafts are conditioned on [..., D]."""
        if not self.config.context_layers:
            return context
        read: mx.array = self.context_proj(context * self.context_scale)
        return read

    def advance(self, state: mx.array, embedding: mx.array) -> mx.array:
        """The next recurrent state, from the last one and the last token's embedding [..., D]."""
        if not self.config.rnn:
            return state + embedding
        return nn.silu(self.rnn_w(embedding) + self.rnn_u(state))

    def features(self, context: mx.array, state: mx.array) -> mx.array:
        """What the output layer reads: [..., D] twice -> [..., E], [..., D] for a tied head.

        context: as `read` gives it
        """
        x = mx.concatenate([context, state], axis=-1)
        if 2 * self.config.hidden_size != self.config.exit_dim:
            x = self.input_proj(x)
        for block in self.lm_head[: self.config.num_draft_layers]:
            x = block(x)
        if self.config.head == "own":
            return x
        if self.config.exit_dim != self.config.hidden_size:
            x = self.output_proj(x)
        normed: mx.array = self.output_norm(x)
        return normed

    def bind(self, target: Target) -> BoundDrafter:
        """This drafter with the target's embedding and, if tied, its output layer.

        Raises MismatchError when hidden size or vocabulary differ.
        """
        check_target(self.config, target.hidden_size, target.vocab_size)
        tokens = self.draft_vocab if self.config.draft_vocab_size is not None else None
        head = target.output_rows(tokens) if self.config.head == "tied" else self.lm_head[-1]
        return BoundDrafter(self, target.embedding, head, tokens)


@dataclass(frozen=True)
class BoundDrafter:
    """A drafter that can propose: its parameters, the target's embedding, an output layer.

    tokens: [V'] int32, the token of each output; None when outputs are tokens
    """

    drafter: Drafter
    embedding: Callable[[mx.array], mx.array]
    head: Callable[[mx.array], mx.array]
    tokens: mx.array | None

    @property
    def reads_context(self) -> tuple[int, ...]:
        return self.drafter.config.context_layers

    def propose(self, given: DraftInput, shape: BeamShape) -> Beams:
        """Candidates behind the root by beam search; see `beam_search`."""
        return beam_search(self, self.read(given.context), given.root, shape)

    def read(self, context: mx.array) -> mx.array:
        """The target's hidden states [..., C] as the context [..., D] of drafts."""
        return self.drafter.read(context)

    def advance(self, state: mx.array, tokens: mx.array) -> mx.array:
        """Next state [B, W, D] after tokens [B, W]."""
        return self.drafter.advance(state, self.embedding(tokens).astype(state.dtype))

    def draw(
        self, given: DraftInput, keys: mx.array, shape: BeamShape, params: SamplingParams
    ) -> SampledDrafts:
        """Candidates drawn from the drafter's distribution; see `draw_drafts`."""
        context = self.read(given.context)
        return draw_drafts(self, context, given.root, given.position, keys, shape, params)

    def logits(self, context: mx.array, state: mx.array) -> mx.array:
        """Logits [B, W, V'] float32 of the next token."""
        return self.head(self.drafter.features(context, state)).astype(mx.float32)

    def over_vocabulary(self, log_probs: mx.array) -> mx.array:
        """Log-probabilities [..., V'] as [..., V], -inf for what cannot be drafted."""
        if self.tokens is None:
            return log_probs
        everything = mx.full((*log_probs.shape[:-1], self.drafter.config.vocab_size), -mx.inf)
        index = mx.broadcast_to(self.tokens, log_probs.shape)
        return mx.put_along_axis(everything, index, log_probs, axis=-1)

    def to_tokens(self, outputs: mx.array) -> mx.array:
        """Output indices as token ids."""
        return outputs if self.tokens is None else self.tokens[outputs]

    @property
    def output_size(self) -> int:
        return self.drafter.config.output_size
