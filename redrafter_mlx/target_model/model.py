"""The target: an unmodified mlx-lm model, called on prompts and on trees of drafts.

An mlx-lm attention layer needs three things from its cache: rotary positions (`offset`), a mask
(`make_mask`), and keys and values (`update_and_fetch`). `TreeCache` provides all three for a tree,
so the layers run unchanged. Only rotary embeddings need a wrapper (`wrapped_layers.py`). On a
CPU, attention and SwiGLU are faster functions, and each call sets its threads (`cpu/door.py`).

The caller's model object is never changed: `Target` works on a copy of its module tree that
shares every array.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache

from redrafter_mlx.cpu.door import prepare_for, threads_by_rows
from redrafter_mlx.errors import MismatchError
from redrafter_mlx.runtime.device import WIRED_MEMORY, ModelLock
from redrafter_mlx.speculation.tree import TokenTree
from redrafter_mlx.target_model.adapter import (
    find_backbone,
    find_embedding,
    find_head,
    head_of,
    layers_of,
    recording,
    restricted_to,
    scale_by_node,
    unsupported,
    with_node_positions,
    without_head,
)
from redrafter_mlx.target_model.cache.forms import check_cache, with_caches_of
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.cache.packed_cache import Packing
from redrafter_mlx.target_model.compiled import TreeCall
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.target_model.probe import packing_of, probe
from redrafter_mlx.target_model.recurrent.mixers import Mixers
from redrafter_mlx.target_model.row_masks import (
    Backbone,
    call_on_rows,
    reads_windows,
    with_grouped_masks,
)


class Target:
    """A model that verifies trees.

    model_type:  mlx-lm's name of the architecture
    hidden_size: D, of the final norm's output
    context_layers: layers whose inputs are read in addition to the final norm's output; see
                 `reading`
    vocab_size:  V, of the logits
    n_caches:    number of caches: layers without attention or a recurrence have none
    states:      by index of those that hold a recurrent state, what computes it
    windows:     by index of those whose layers attend to a sliding window alone, its size
    packing:     how the caches quantise keys and values of whole texts; None if they do not
    model:       the caller's own, or the language model in it
    plain:       the same, for mlx-lm's own loops on its own caches
    dtype:       of the hidden states
    embedding:   the target's own token embedding, which the drafter reads
    call:        hidden states and logits of tokens [B, N] that a cache is planned for
    row_masks:   whether mlx-lm's batched caches may be used, with a mask for each batch row where
                 keys are kept; not all recurrences take one
    builds_ahead: whether a call may be built and dropped
    submits_ahead: whether a call is submitted before the results of the one before are read
    has_all_keys: whether its caches hold the keys of all heads and layers
    """

    def __init__(
        self, model: nn.Module, *, kv_bits: int | None = None, quantized_kv_start: int = 0
    ) -> None:
        """Raise UnsupportedModelError, naming the model, for state that a tree cannot share.

        kv_bits: quantise keys and values of whole texts to so many bits, see `packed_cache`
        quantized_kv_start: number of a text's first positions that are not quantised
        """
        whole = cast(nn.Module, getattr(model, "language_model", model))
        self.model_type = str(getattr(whole, "model_type", type(whole).__module__))
        _, backbone = find_backbone(whole, self.model_type)
        self._forms = check_cache(whole, self.model_type)
        recurrent = any(any(form.states) for form in self._forms)
        mixers = Mixers() if recurrent else None
        view, self._rotations, self._linears = with_node_positions(backbone, mixers)
        others = self._rotations.others
        if others or not (self._rotations.count or recurrent):  # which counts positions itself
            have = f"embeddings of type {' and '.join(sorted(others))}" if others else "none"
            raise unsupported(
                self.model_type,
                f"it needs rotary embeddings that take node positions, and has {have}",
            )
        without_head(view)
        scale_by_node(view)
        #: Held while a step is built, submitted and read: callers take turns step by step.
        self.lock = ModelLock()
        self.builds_ahead = self.submits_ahead = self.has_all_keys = True
        self.model = self.plain = whole
        self._backbone = view
        self._head = head_of(whole, self.model_type)
        self.context_layers: tuple[int, ...] = ()
        self.packing: Packing | None = None
        self.embedding = find_embedding(backbone, self.model_type)
        sample = self.embedding(mx.array([[0]]))
        self.dtype: mx.Dtype = sample.dtype
        self.hidden_size = int(sample.shape[-1])
        self._probe(kv_bits, quantized_kv_start)
        self.vocab_size = int(self._head(sample).shape[-1])
        self._connect(view)
        if not reads_windows(self._read, Target.new_cache(self)):
            self.windows = dict[int, int]()
            self._connect(view)
        own = not any(form.is_list and not any(form.states) for form in self._forms)
        self.row_masks = own and (
            not self._grouped or call_on_rows(self._read, Target.new_cache(self)) is not None
        )

    def reading(self, layers: Sequence[int]) -> Target:
        """Return the same model with hidden states that include the inputs of these layers.

        Hidden states [..., D] become [..., C], C = (len(layers) + 1) * D: the layers' inputs in
        the given order, then the final norm's output. A layer late in the model, but not the last,
        carries more information about the token after next (EAGLE-3, arXiv 2503.01840, reads three
        layers).

        Raises MismatchError, naming the layer, for one that the model does not have.
        """
        if tuple(layers) == self.context_layers:
            return self
        self._check_layers(layers)
        view = copy.copy(self)
        view.context_layers = tuple(layers)
        record = recording(self._backbone, layers, self.model_type)

        def read(tokens: mx.array, cache: Sequence[object] | None) -> mx.array:
            seen, out = record(tokens, cache)
            return mx.concatenate([*seen, out], axis=-1) if seen else out

        view._connect(read)
        return view

    @property
    def n_layers(self) -> int:
        """Number of layers, whose inputs a drafter may read."""
        return len(layers_of(self._backbone, self.model_type))

    @property
    def context_size(self) -> int:
        """C, the size of the hidden states."""
        return self.hidden_size * (len(self.context_layers) + 1)

    @property
    def compiled(self) -> int:
        """Number of graphs compiled so far, including those dropped since."""
        return self.call.graphs.compiled

    @property
    def slow_calls(self) -> int:
        """Number of calls so far that took longer than others of their size: compiled, or built."""
        return self.call.graphs.compiled + self.call.built

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context of calls that follow one another.

        Memory stays wired on Metal; a CPU's cores are all free for other work at its end.
        """
        with WIRED_MEMORY.held(), threads_by_rows():
            yield

    def new_cache(self, *, whole: bool = False) -> TreeCache:
        """Return an empty cache; a whole one keeps all positions of layers with a window."""
        packing = self.packing
        return TreeCache(self.n_caches, self.states, self.windows, whole=whole, packing=packing)

    def mlx_lm_caches(self) -> list[KVCache | ArraysCache]:
        """Return empty caches of mlx-lm, for `hidden` on one text after the other."""
        sizes = [len(self.states.get(i, ())) for i in range(self.n_caches)]
        return [ArraysCache(size) if size else KVCache() for size in sizes]

    def append(self, tokens: mx.array, cache: TreeCache, start: int, length: int = 0) -> mx.array:
        """Append prompt tokens [B, P] at position `start`; return hidden states [B, P, C].

        length: of the whole prompt, of which these are a part
        """
        prepare_for(tokens.size)
        cache.plan_prompt(start, tokens.shape[1], length)
        return self.hidden(tokens, cache.layers)

    def verify(
        self,
        tree: TokenTree,
        cache: TreeCache,
        length: mx.array,
        bound: int,
        compiled: bool = True,
    ) -> tuple[mx.array, mx.array]:
        """Call the model once on all nodes; each sees the committed text and its ancestors.

        Shapes:
          length: [B] int32, committed, at most `bound`
        Returns:
          hidden: [B, N, C], logits: [B, N, V]
        """
        prepare_for(tree.tokens.size)
        cache.plan_tree(tree, length, bound)
        return self.call(tree.tokens, cache, compiled)

    def hidden(self, tokens: mx.array, cache: Sequence[object]) -> mx.array:
        """Return hidden states [B, N, C] of a call on one cache per layer; each may be None."""
        return self._read(tokens, cache=None if cache[0] is None else cache)

    def logits(self, hidden: mx.array) -> mx.array:
        """Apply the model's own head, with scaling and soft caps, to hidden states [B, N, C]."""
        out: mx.array = self._head(hidden[..., -self.hidden_size :])
        return out

    def logits_of(self, rows: mx.array | slice | None) -> Callable[[mx.array], mx.array]:
        """Return a map [B, N, C] -> [B, N, V'] to the `logits` of some tokens; None is all."""
        if rows is None:
            return self.logits
        head, size = head_of(self.model, self.model_type, rows), self.hidden_size
        return lambda hidden: head(hidden[..., -size:])

    @property
    def output_bytes(self) -> int:
        """Bytes of the output layer, or of the embedding that it is tied to."""
        return nbytes_of(find_head(self.model) or self.embedding)

    def output_rows(self, rows: mx.array | slice | None = None) -> Callable[[mx.array], mx.array]:
        """Return the output layer restricted to some tokens, as a map [..., D] -> [..., V'].

        Drafters share it. It leaves out scaling and soft caps, so the results are not the target's
        logits; use `logits_of` for those.
        """
        layer = find_head(self.model)
        if layer is not None:
            return restricted_to(layer, rows)
        shared: Callable[[mx.array], mx.array] = restricted_to(self.embedding, rows).as_linear
        return shared

    def _connect(self, read: Backbone) -> None:
        """Call `read`, whose hidden states end with those that the head takes.

        It gets caches for those layers alone that keep keys, and row masks in the form it takes.
        """
        read = with_caches_of(self._forms, self._used, read)
        self._read = self._rotations.sharing(with_grouped_masks(read) if self._grouped else read)
        head, size = self._head, self.hidden_size  # and not `self`, which holds the graphs
        new_cache = partial(
            TreeCache, self.n_caches, self.states, self.windows, packing=self.packing
        )
        self.call = TreeCall(
            self._read, lambda hidden: head(hidden[..., -size:]), self._linears, new_cache
        )

    def _probe(self, kv_bits: int | None, start: int) -> None:
        """Find out how the model uses our caches; see `probe`."""
        backbone, forms = self._backbone, self._forms
        probed = probe(self.model, backbone, forms, self.hidden_size, self.model_type)
        self._grouped, self._used = probed.grouped, probed.used
        self.n_caches = sum(probed.used)
        self.states, self.windows = {**probed.states}, {**probed.windows}
        if kv_bits is not None:
            self.packing = packing_of(probed, backbone, forms, kv_bits, start, self.model_type)

    def _check_layers(self, indices: Sequence[int]) -> None:
        """Raise MismatchError, naming the layer, for one that the model does not have."""
        count = self.n_layers
        for i in indices:
            if i > count:
                raise MismatchError(
                    f"the drafter reads layer {i}, {self.model_type} has {count}; "
                    f"train a drafter for this target with `redrafter-mlx train`"
                )
