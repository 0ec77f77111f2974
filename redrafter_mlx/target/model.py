"""The target: an unmodified mlx-lm model, called on prompts and on trees of drafts.

An mlx-lm attention layer asks three things of its cache: rotary positions (`offset`), a mask
(`make_mask`), and keys and values (`update_and_fetch`). `TreeCache` answers all three for a tree,
so the layers run as they are. Only rotary embedding needs help (`target/rotary.py`).

The caller's model object is never changed: `Target` works on a copy of its module tree that
shares every array.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence, Sized
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from redrafter_mlx.errors import MismatchError
from redrafter_mlx.runtime.process import ModelLock
from redrafter_mlx.speculation.tree import TokenTree
from redrafter_mlx.target.adapter import (
    check_cache,
    find_backbone,
    find_embedding,
    find_head,
    head_of,
    layers_of,
    recording,
    restricted_to,
    unsupported,
    with_node_positions,
)
from redrafter_mlx.target.compiled import TreeCall
from redrafter_mlx.target.kv_cache import TreeCache

PREFILL_CHUNK = 2048
"""Prompt tokens a call, as in mlx-lm."""


class Target:
    """A model that verifies trees.

    model_type:  mlx-lm's name of the architecture
    hidden_size: D, of the final norm's output
    context_layers: whose inputs are read besides the final norm's output; see `reading`
    vocab_size:  V, of the logits
    n_layers:    of keys and values
    model:       the caller's own, or the language model in it
    plain:       the same for mlx-lm's own loops on its own caches
    dtype:       of the hidden states
    embedding:   the target's own token embedding, which the drafter reads
    builds_ahead: whether a call may be built and dropped
    """

    def __init__(self, model: nn.Module) -> None:
        """Raises UnsupportedModelError, naming the model, for state that a tree cannot share."""
        whole = cast(nn.Module, getattr(model, "language_model", model))
        self.model_type = str(getattr(whole, "model_type", type(whole).__module__))
        _, backbone = find_backbone(whole, self.model_type)
        check_cache(whole, self.model_type)
        view, rotations = with_node_positions(backbone)
        layers = len(make_prompt_cache(whole))
        if rotations.count < layers:
            without = layers - rotations.count
            raise unsupported(
                self.model_type,
                f"{without} of its {layers} layers have no rotary embedding that takes positions",
            )
        #: Held while a step is built, submitted and read: callers take turns step by step.
        self.lock = ModelLock()
        self.n_layers, self.builds_ahead = layers, True
        self.model = self.plain = whole
        self._backbone, self._rotations = view, rotations
        self._head = head_of(whole, self.model_type)
        self.context_layers: tuple[int, ...] = ()
        self._read: Callable[..., mx.array] = rotations.sharing(view)
        self._tree_call = TreeCall(self._read, self._head)
        self.embedding = find_embedding(backbone, self.model_type)
        sample = self.embedding(mx.array([[0]]))
        self.dtype: mx.Dtype = sample.dtype
        self.hidden_size = int(sample.shape[-1])
        self.vocab_size = int(self._head(sample).shape[-1])

    def reading(self, layers: Sequence[int]) -> Target:
        """The same model, whose hidden states hold the inputs of these layers too.

        Hidden states [..., D] become [..., C], C = (len(layers) + 1) * D: the layers' inputs in
        the order given, and the final norm's output last. A layer late in the model, but not the
        last, knows more of the token after next (EAGLE-3, arXiv 2503.01840, reads three).

        Raises MismatchError, naming the layer, for one that the model does not have.
        """
        if tuple(layers) == self.context_layers:
            return self
        self._check_layers(layers)
        view = copy.copy(self)
        view.context_layers = tuple(layers)
        view._read = self._rotations.sharing(self._backbone)
        head, size = (
            self._head,
            self.hidden_size,
        )  # not the view, which holds the graph
        if layers:
            record = recording(self._backbone, layers, self.model_type)

            def read(tokens: mx.array, cache: Sequence[object]) -> mx.array:
                seen, out = record(tokens, cache)
                return mx.concatenate([*seen, out], axis=-1)

            view._read = self._rotations.sharing(read)
        view._tree_call = TreeCall(view._read, lambda context: head(context[..., -size:]))
        return view

    @property
    def context_size(self) -> int:
        """C, of the hidden states."""
        return self.hidden_size * (len(self.context_layers) + 1)

    @property
    def graphs(self) -> Sized:
        """The compiled graphs of its calls on trees."""
        return self._tree_call.graphs

    @property
    def compiled(self) -> int:
        """How many of them were compiled so far, those included that were dropped since."""
        return self._tree_call.graphs.compiled

    def new_cache(self) -> TreeCache:
        return TreeCache(self.n_layers)

    def append(self, tokens: mx.array, cache: TreeCache, start: int) -> mx.array:
        """Append prompt tokens [B, P] at position `start`; their hidden states [B, P, C]."""
        cache.plan_prompt(start, tokens.shape[1])
        return self.hidden(tokens, cache.layers)

    def prefill(self, tokens: mx.array, cache: TreeCache, start: int, last: list[int]) -> mx.array:
        """Append prompt tokens [B, P] at position `start`; the hidden states at `last[b]` of each.

        Works in chunks of PREFILL_CHUNK tokens, each evaluated before the next one starts, so
        that memory stays bounded.

        Returns:
          [B, 1, C]
        """
        context: dict[int, mx.array] = {}
        for at in range(0, tokens.shape[1], PREFILL_CHUNK):
            chunk = tokens[:, at : at + PREFILL_CHUNK]
            hidden = self.append(chunk, cache, start + at)
            for b, position in enumerate(last):
                if at <= position < at + chunk.shape[1]:
                    context[b] = hidden[b, position - at]
            mx.async_eval(*cache.buffers, *context.values())
            if at + PREFILL_CHUNK < tokens.shape[1]:
                mx.eval(cache.buffers)
                mx.clear_cache()
        return mx.stack([context[b] for b in range(len(last))])[:, None]

    def verify(
        self,
        tree: TokenTree,
        cache: TreeCache,
        length: mx.array,
        bound: int,
        compiled: bool = True,
    ) -> tuple[mx.array, mx.array]:
        """One call on all nodes of a tree, each seeing the committed text and its ancestors.

        Shapes:
          length: [B] int32, committed; `bound` is the most that it can be
        Returns:
          hidden: [B, N, C], logits: [B, N, V]
        """
        cache.plan_tree(tree, length, bound)
        return self.call(tree.tokens, cache, compiled)

    def call(
        self, tokens: mx.array, cache: TreeCache, compiled: bool = True
    ) -> tuple[mx.array, mx.array]:
        """One call on tokens [B, N] that the cache is planned for: hidden states and logits."""
        return self._tree_call(tokens, cache, compiled)

    def hidden(self, tokens: mx.array, cache: Sequence[object]) -> mx.array:
        """Hidden states [B, N, C] of a plain call on mlx-lm's own caches, one per layer."""
        return self._read(tokens, cache=cache)

    def logits(self, hidden: mx.array) -> mx.array:
        """The model's own head (with its scaling and soft caps) on hidden states [B, N, C]."""
        out: mx.array = self._head(hidden[..., -self.hidden_size :])
        return out

    def logits_of(self, tokens: mx.array | None) -> Callable[[mx.array], mx.array]:
        """`logits` of `tokens` [V'] only (None is all), as a map [B, N, C] -> [B, N, V']."""
        if tokens is None:
            return self.logits
        head, size = head_of(self.model, self.model_type, tokens), self.hidden_size
        return lambda hidden: head(hidden[..., -size:])

    def output_rows(self, tokens: mx.array | None = None) -> Callable[[mx.array], mx.array]:
        """The output layer restricted to `tokens` [V'], as a map [..., D] -> [..., V'].

        For drafters to share. Scaling and soft caps are left out: these are not the target's
        logits, which `logits_of` gives.
        """
        layer = find_head(self.model)
        if layer is not None:
            return restricted_to(layer, tokens)
        shared: Callable[[mx.array], mx.array] = restricted_to(self.embedding, tokens).as_linear
        return shared

    def _check_layers(self, indices: Sequence[int]) -> None:
        """Raises MismatchError, naming the layer, for one that the model does not have."""
        count = len(layers_of(self._backbone, self.model_type))
        for i in indices:
            if i >= count:
                raise MismatchError(
                    f"the drafter reads layer {i}, {self.model_type} has {count}; "
                    f"train a drafter for this target with `redrafter-mlx train`"
                )
