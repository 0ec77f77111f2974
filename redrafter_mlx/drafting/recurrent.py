"""The ReDrafter drafter: a small recurrent head that reads the target's last hidden state.

Paper, section 3.1: s' = silu(W e + U s + b) over the target's own token embeddings, then residual
blocks over [context, s'] and an output layer. Parameter names are those of the paper's code, so
a folder of its weights loads as it is: `config.json` and `model.safetensors`.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.drafting.files import recognition
from redrafter_mlx.drafting.files.drafter_files import (
    DrafterFiles,
    Form,
    check_pair,
    check_tokens,
    fill,
    parameters_of,
    write_drafter,
)
from redrafter_mlx.drafting.interface import Features
from redrafter_mlx.drafting.level_drafter import DraftLevels, MemorylessDrafter, shuffled
from redrafter_mlx.drafting.recurrent_config import DrafterConfig, config_of
from redrafter_mlx.speculation.beam_search import select
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.model import Target

_OTHER_NAMES = (("input_projs.", "input_proj."), ("lm_heads.", "lm_head."), ("0.", "lm_head."))
"""Other prefixes of tensor names and the paper's, from TensorRT-LLM's
examples/redrafter/convert_checkpoint.py."""


class ResidualBlock(nn.Module):
    """x + silu(linear(x)) over [..., E]."""

    def __init__(self, size: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return x + nn.silu(self.linear(x))


class RecurrentNetwork(nn.Module):
    """The drafter's own parameters; `bind` adds the target's embedding and output layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        D, E = config.hidden_size, config.exit_dim
        if config.context_layers:
            self.context_scale = mx.ones((config.context_size,))
            self.freeze(recurse=False, keys=["context_scale"])  # computed from the corpus
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
    def fresh(cls, config: DrafterConfig, seed: int) -> RecurrentNetwork:
        """Return an untrained network: linear layers drawn as by mlx.nn, but from `seed` alone."""
        drafter = cls(config)
        layers = [m for _, m in sorted(drafter.named_modules()) if isinstance(m, nn.Linear)]
        keys = mx.random.split(mx.random.key(seed), 2 * len(layers))
        for layer, (for_weight, for_bias) in zip(layers, keys.reshape(-1, 2, 2), strict=True):
            bound = layer.weight.shape[1] ** -0.5
            layer.weight = mx.random.uniform(-bound, bound, layer.weight.shape, key=for_weight)
            if "bias" in layer:
                layer.bias = mx.random.uniform(-bound, bound, layer.bias.shape, key=for_bias)
        return drafter

    def read(self, context: mx.array) -> mx.array:
        """Map the target's hidden states [..., C] to the context of drafts [..., D]."""
        if not self.config.context_layers:
            return context
        read: mx.array = self.context_proj(context * self.context_scale)
        return read

    def advance(self, state: mx.array, embedding: mx.array) -> mx.array:
        """Return the next recurrent state, from the last state and token embedding [..., D]."""
        if not self.config.rnn:
            return state + embedding
        return nn.silu(self.rnn_w(embedding) + self.rnn_u(state))

    def begin(self, embedding: mx.array) -> mx.array:
        """Return the recurrent state after the root's embedding [..., D]."""
        if self.config.first_state == "embedding":
            return embedding
        return self.advance(mx.zeros_like(embedding), embedding)

    def features(self, context: mx.array, state: mx.array) -> mx.array:
        """Return the output layer's input: [..., D] twice -> [..., E], [..., D] for a tied head.

        context: as returned by `read`
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

    def bind(self, target: Target, tokenizer: TokenizerWrapper | None = None) -> RecurrentDrafter:
        """Return the drafter with the target's embedding and, if tied, its output layer.

        Raises MismatchError if hidden size or vocabulary differ.
        """
        del tokenizer  # it was trained on the target's own tokens
        check_pair(self.config.hidden_size, target.hidden_size, "hidden size")
        check_pair(self.config.vocab_size, target.vocab_size, "vocabulary")
        return RecurrentDrafter(self, target)


class RecurrentDrafter(MemorylessDrafter, well_formed=True):
    """The recurrent form of a drafter: it reads only the newest features and has no memory."""

    def __init__(self, network: RecurrentNetwork, target: Target) -> None:
        self.config = config = network.config
        tokens = network.draft_vocab if config.draft_vocab_size is not None else None
        vocabulary = DraftVocabulary(config.output_size, config.vocab_size, tokens)
        super().__init__("drafter", network, vocabulary)
        self._network, self._target = network, target
        self._head = target.output_rows(tokens) if config.head == "tied" else network.lm_head[-1]

    def untrained(self) -> RecurrentNetwork:
        return shuffled(self._network)

    @property
    def features(self) -> Features:
        return Features(self.config.context_layers, hidden=True)

    @property
    def trained_length(self) -> int | None:
        drafts = self.config.draft_length
        return None if drafts is None else drafts + 1

    def levels_of(self, features: mx.array, root: mx.array, drafts: int) -> RecurrentLevels:
        del drafts
        return RecurrentLevels(self, self._network.read(features), root)

    def begin(self, roots: mx.array) -> mx.array:
        """First state [B, 1, D] after roots [B]."""
        return self._network.begin(self._target.embedding(roots[:, None]))

    def advance(self, state: mx.array, tokens: mx.array) -> mx.array:
        """Next state [B, W, D] after tokens [B, W]."""
        return self._network.advance(state, self._target.embedding(tokens).astype(state.dtype))

    def logits(self, context: mx.array, state: mx.array) -> mx.array:
        """Logits [B, W, V'] float32 of the next token."""
        return self._head(self._network.features(context, state)).astype(mx.float32)


class RecurrentLevels(DraftLevels):
    """A recurrent state for each beam; see `DraftLevels`."""

    def __init__(self, drafter: RecurrentDrafter, context: mx.array, root: mx.array) -> None:
        super().__init__(drafter.vocabulary)
        self._drafter = drafter
        self._context = context[:, None]
        self._state = drafter.begin(root)

    def first(self) -> mx.array:
        return self._drafter.logits(self._context, self._state)

    def following(self, parents: mx.array, tokens: mx.array) -> mx.array:
        self._state = self._drafter.advance(select(self._state, parents), tokens)
        context = mx.broadcast_to(self._context, self._state.shape)
        return self._drafter.logits(context, self._state)


def load_recurrent(files: DrafterFiles, target: Target) -> RecurrentNetwork:
    """Load a drafter's parameters, evaluated, in the target's arithmetic; errors as `Form.load`."""
    config = config_of(files.folder, files.config)
    check_pair(config.hidden_size, target.hidden_size, "hidden size")
    check_pair(config.vocab_size, target.vocab_size, "vocabulary")
    drafter = RecurrentNetwork(config)
    tensors = files.read(own_name)
    if "draft_vocab" in tensors:
        check_tokens(tensors["draft_vocab"], "draft_vocab", config.vocab_size, files.tensors.path)
        tensors["draft_vocab"] = tensors["draft_vocab"].astype(mx.int32)
    fill(drafter, tensors, files, target.dtype)
    return drafter


def own_name(name: str) -> str:
    """Return the paper's name of a tensor, given any name that TensorRT-LLM's converter reads."""
    for other, own in _OTHER_NAMES:
        if name.startswith(other):
            return own + name.removeprefix(other)
    return name


RECURRENT = Form(
    recognition.RECURRENT,
    load=lambda files, target: load_recurrent(files, target).bind(target),
)
"""The paper's own files, with or without our extensions, and those that TensorRT-LLM reads."""


def save_drafter(
    drafter: RecurrentNetwork, folder: str | Path, *, dtype: mx.Dtype | None = None
) -> None:
    """Write a drafter's folder; each file is written atomically, the weights first.

    dtype: of floating-point tensors in the file; None stores them as they are

    Raises OSError naming the folder if it cannot be written.
    """
    write_drafter(Path(folder), parameters_of(drafter), drafter.config.to_dict(), dtype)
