"""A draft language model: a smaller model with the target's tokenizer guesses ahead.

Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318) draft one candidate with it;
here beam search drafts a tree, level by level, over the draft model's own cache. One call reads the
positions that were committed since the last step and the root, and each further level is a call
with a query row for every beam, so a step takes L - 1 calls of the draft model.
"""

from __future__ import annotations

import copy
from typing import TypeAlias, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.drafting.interface import Drafter, Features, Memory, Seen
from redrafter_mlx.errors import MismatchError
from redrafter_mlx.speculation.beam_search import beam_search
from redrafter_mlx.speculation.rejection import SampledDrafts, draw_drafts
from redrafter_mlx.speculation.tree import Beams, TokenTree, pack_beam
from redrafter_mlx.target.fingerprint import shapes_hash
from redrafter_mlx.target.kv_cache import TreeCache
from redrafter_mlx.target.model import Target

Pairs: TypeAlias = "tuple[tuple[mx.array, mx.array], ...]"
"""Keys and values [B, K, T, head size] of each layer."""


class DraftModel(Drafter):
    """Any mlx-lm model whose cache can hold a tree, as a drafter.

    It remembers keys and values of every committed position: a pair for each layer.
    """

    def __init__(
        self, model: nn.Module, tokenizer: TokenizerWrapper, name: str = "a draft model"
    ) -> None:
        """Raises UnsupportedModelError, naming the model, for state that a tree cannot share."""
        self._model = Target(model)
        self._tokenizer = tokenizer
        self._name = name
        self._common = self._target_vocab = self._model.vocab_size
        self._cost = 1.0

    def bind(self, target: Target, tokenizer: TokenizerWrapper) -> DraftModel:
        """The same model, drafting tokens that the target has too.

        Raises MismatchError, naming the first token that differs.
        """
        bound = copy.copy(self)
        bound._target_vocab = target.vocab_size
        bound._common = min(target.vocab_size, self._model.vocab_size)
        check_same_tokens(self._tokenizer, tokenizer, bound._common, self._name)
        bound._cost = min(_nbytes(self._model.model) / _nbytes(target.model), 1.0)
        return bound

    @property
    def name(self) -> str:
        return self._name

    @property
    def module(self) -> nn.Module:
        return self._model.model

    @property
    def features(self) -> Features:
        return Features(every_position=True)

    @property
    def max_width(self) -> int:
        return self._common

    @property
    def level_cost(self) -> float:
        return self._cost

    @property
    def timing_key(self) -> str:
        return f"draft model {self._model.model_type} {shapes_hash(self.module)}"

    @property
    def can_draw(self) -> bool:
        return True

    def extend(self, memory: Memory, seen: Seen) -> Memory:
        """Keys and values of the committed positions, from one call."""
        cache = self._cache(memory)
        tokens = _embeddable(seen.tokens[:, :-1], self._model)
        if seen.start is None:
            cache.plan_tree(_chain(tokens), seen.position, seen.bound)
        else:
            cache.plan_prompt(seen.start, tokens.shape[1])
        self._model.hidden(tokens, cache.layers)
        return _memory(cache)

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        """The likeliest candidates, by beam search."""
        levels = self._levels(memory, seen)
        beams = beam_search(levels, seen.root, shape)
        return beams, _memory(levels.cache)

    def draw(
        self,
        memory: Memory,
        seen: Seen,
        shape: BeamShape,
        keys: mx.array,
        params: SamplingParams,
    ) -> tuple[SampledDrafts, Memory]:
        """Candidates drawn from the draft model's distribution; see `draw_drafts`."""
        levels = self._levels(memory, seen)
        drafts = draw_drafts(levels, seen.root, seen.root_position, keys, shape, params)
        return drafts, _memory(levels.cache)

    def _levels(self, memory: Memory, seen: Seen) -> _Levels:
        return _Levels(self._model, self._cache(memory), seen, self._common, self._target_vocab)

    def _cache(self, memory: Memory) -> TreeCache:
        cache = self._model.new_cache()
        if memory:
            cache.layer_buffers = [(*pair, None, None) for pair in cast("Pairs", memory)]
        return cache


class _Levels:
    """The draft model's distribution after one root; see `rejection.SampledLevels`.

    The nodes of all levels stand in the cache after the root, where the next step writes over them.

    cache: with the committed positions and the root once `first` was called
    """

    def __init__(
        self, model: Target, cache: TreeCache, seen: Seen, output_size: int, vocab_size: int
    ) -> None:
        self._model = model
        self.cache = cache
        self._seen = seen
        self._output_size = output_size
        self._vocab_size = vocab_size
        self._depth = 0
        self._mask: mx.array | None = None  # [B, W, nodes so far], of the last level

    @property
    def output_size(self) -> int:
        return self._output_size

    def first(self) -> mx.array:
        """Logits [B, 1, V'] after the root; reads what was committed since the last step."""
        seen = self._seen
        tokens = _embeddable(seen.tokens, self._model)
        self.cache.plan_tree(_chain(tokens), seen.position, seen.bound)
        hidden, _ = self._model.call(tokens, self.cache)
        at_root = mx.take_along_axis(hidden, seen.count[:, None, None], axis=1)
        return self._cut(self._model.logits(at_root))

    def following(self, parents: mx.array, tokens: mx.array) -> mx.array:
        """Logits [B, W, V'] after tokens [B, W], which extend the beams `parents` [B, W]."""
        B, W = tokens.shape
        mask = mx.broadcast_to(mx.eye(W, dtype=mx.bool_), (B, W, W))
        if self._mask is not None:
            above = mx.take_along_axis(self._mask, parents[:, :, None], axis=1)
            mask = mx.concatenate([above, mask], axis=2)
        self._mask = mask
        seen = self._seen
        self.cache.plan_level(mask, self._depth, seen.root_position + 1, seen.bound + 1)
        self._depth += 1
        _, logits = self._model.call(_embeddable(tokens, self._model), self.cache)
        return self._cut(logits)

    def to_tokens(self, outputs: mx.array) -> mx.array:
        """Output indices are token ids."""
        return outputs

    def over_vocabulary(self, log_probs: mx.array) -> mx.array:
        """Log-probabilities [..., V'] as [..., V], -inf for what cannot be drafted."""
        missing = self._vocab_size - self._output_size
        edges = [(0, 0)] * (log_probs.ndim - 1) + [(0, missing)]
        return mx.pad(log_probs, edges, constant_values=-mx.inf)

    def _cut(self, logits: mx.array) -> mx.array:
        return logits[..., : self._output_size].astype(mx.float32)


def check_same_tokens(
    own: TokenizerWrapper, target: TokenizerWrapper, common: int, name: str
) -> None:
    """Raise MismatchError unless both tokenizers mean the same by each id below `common`.

    Ids that one of them does not use, which pad a vocabulary, are passed over.
    """
    theirs = {i: token for token, i in target.get_vocab().items()}
    mine = {i: token for token, i in own.get_vocab().items()}
    for i in range(common):
        if i in mine and i in theirs and mine[i] != theirs[i]:
            raise MismatchError(
                f"token {i} is {mine[i]!r} in {name} and {theirs[i]!r} in the target; a draft "
                f"model must have the target's tokenizer"
            )


def _embeddable(tokens: mx.array, model: Target) -> mx.array:
    """Tokens that the model has an embedding for, its last one in place of others."""
    return mx.minimum(tokens, model.vocab_size - 1)


def _chain(tokens: mx.array) -> TokenTree:
    """Tokens [B, P], each the child of the one before."""
    candidate = tokens[:, None].astype(mx.int32)
    return pack_beam(Beams(candidate, mx.zeros(candidate.shape)), tokens.shape[1])


def _memory(cache: TreeCache) -> Memory:
    """What the cache holds, a pair of keys and values for each layer."""
    return cast("Memory", tuple((keys, values) for keys, values, *_ in cache.layer_buffers))


def _nbytes(module: nn.Module) -> int:
    leaves = cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters()))
    return sum(array.nbytes for _, array in leaves)
