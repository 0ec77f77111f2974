"""The target: an unmodified mlx-lm model, called on prompts and on trees of drafts.

An mlx-lm attention layer asks three things of its cache: rotary positions (`offset`), a mask
(`make_mask`), and keys and values (`update_and_fetch`). `TreeCache` answers all three for a tree,
so the layers run as they are. Only rotary embedding needs help: MLX's takes one position per
batch row, so nodes of different depth are folded into the batch axis around it.

The caller's model object is never changed: `Target` works on a copy of its module tree that
shares every array.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE

from redrafter_mlx.cache import TreeCache
from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.tree import Beams, TokenTree, pack_beam

PREFILL_CHUNK = 2048
"""Prompt tokens a call, as in mlx-lm."""

_BACKBONE_NAMES = ("model", "transformer", "backbone")
_HEAD_NAMES = ("lm_head", "output", "head")
_ROPE_NAMES = ("rope", "rotary_emb")
_ROPE_TYPES = (nn.RoPE, Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE)


class Target:
    """A model that verifies trees.

    model_type:  mlx-lm's name of the architecture
    hidden_size: D, of the final norm's output
    vocab_size:  V, of the logits
    n_layers:    of keys and values
    dtype:       of the hidden states
    embedding:   the target's own token embedding, which the drafter reads
    """

    def __init__(self, model: nn.Module) -> None:
        """Raises UnsupportedModelError, naming the model, for state that a tree cannot share."""
        whole = cast(nn.Module, getattr(model, "language_model", model))
        self.model_type = str(getattr(whole, "model_type", type(whole).__module__))
        name, backbone = _find_backbone(whole, self.model_type)
        _check_cache(whole, self.model_type)
        view, ropes = _with_node_positions(backbone)
        layers = len(make_prompt_cache(whole))
        if ropes < layers:
            raise _unsupported(
                self.model_type,
                f"{layers - ropes} of its {layers} layers have no rotary embedding that takes "
                f"positions",
            )
        #: Held while a step is built, submitted and read, so that callers queue up by steps.
        self.lock = threading.Lock()
        self.n_layers = layers
        self._model = whole
        self._backbone = view
        self._head = copy.copy(whole)
        setattr(self._head, name, _HiddenAsInput(backbone))
        self.embedding = _find_embedding(backbone, self.model_type)
        sample = self.embedding(mx.array([[0]]))
        self.dtype: mx.Dtype = sample.dtype
        self.hidden_size = int(sample.shape[-1])
        self.vocab_size = int(self._head(sample).shape[-1])

    def new_cache(self) -> TreeCache:
        return TreeCache(self.n_layers)

    def prefill(self, tokens: mx.array, cache: TreeCache, start: int, last: list[int]) -> mx.array:
        """Append prompt tokens [B, P] at row `start`; the context behind token `last[b]` of each.

        Works in chunks of PREFILL_CHUNK tokens, each evaluated before the next one starts, so
        that memory stays bounded.

        Returns:
          context: [B, D]
        """
        context: dict[int, mx.array] = {}
        for at in range(0, tokens.shape[1], PREFILL_CHUNK):
            chunk = tokens[:, at : at + PREFILL_CHUNK]
            cache.plan_prompt(start + at, chunk.shape[1])
            hidden = self.hidden(chunk, cache.layers)
            for b, place in enumerate(last):
                if at <= place < at + chunk.shape[1]:
                    context[b] = hidden[b, place - at]
            mx.async_eval(*cache.buffers, *context.values())
            if at + PREFILL_CHUNK < tokens.shape[1]:
                mx.eval(cache.buffers)
                mx.clear_cache()
        return mx.stack([context[b] for b in range(len(last))])

    def verify(
        self, tree: TokenTree, cache: TreeCache, length: mx.array, bound: int
    ) -> tuple[mx.array, mx.array]:
        """One call on all nodes of a tree, each seeing the committed text and its ancestors.

        Shapes:
          length: [B] int32, committed; `bound` is the most that it can be
        Returns:
          hidden: [B, N, D], logits: [B, N, V]
        """
        cache.plan_tree(tree, length, bound)
        hidden = self.hidden(tree.tokens, cache.layers)
        return hidden, self.logits(hidden)

    def hidden(self, tokens: mx.array, cache: Sequence[object]) -> mx.array:
        """The final-norm output [B, N, D] of a plain call on mlx-lm's own caches, one a layer."""
        out: mx.array = self._backbone(tokens, cache=cache)
        return out

    def logits(self, hidden: mx.array) -> mx.array:
        """The model's own head (with its scaling and soft caps) on hidden states [B, N, D]."""
        out: mx.array = self._head(hidden)
        return out

    def output_rows(self, tokens: mx.array | None = None) -> Callable[[mx.array], mx.array]:
        """The output layer restricted to `tokens` [V'], as a map [..., D] -> [..., V'].

        Quantised rows stay quantised. Scaling and soft caps, which change no order, are left out.
        """
        layer = next((h for n in _HEAD_NAMES if (h := self._model.get(n)) is not None), None)
        return _rows_of(self.embedding if layer is None else layer, tokens)

    def check_trees(self, tolerance: float | None = None) -> float:
        """Compare a small tree with mlx-lm's own sequential call; returns the relative error.

        Raises UnsupportedModelError when the tree's logits are not those of the sequence, which
        is how an architecture whose attention works differently is noticed.
        """
        V = self.vocab_size
        prompt = [t % V for t in (1, 5, 2, 7)]
        candidates = [[t % V for t in row] for row in ((3, 11, 4), (3, 12, 9), (3, 11, 8))]
        scores = [[0.0, -1.0, -2.0], [0.0, -1.5, -2.5], [0.0, -1.0, -3.0]]
        tree = pack_beam(Beams(mx.array([candidates]), mx.array([scores])), 6)
        cache = self.new_cache()
        self.prefill(mx.array([prompt]), cache, 0, [len(prompt) - 1])
        _, got = self.verify(tree, cache, mx.array([len(prompt)]), len(prompt))
        errors = []
        for candidate in candidates:
            alone = make_prompt_cache(self._model)
            want = self._model(mx.array([prompt + candidate]), cache=alone)[0, -1]
            leaf = mx.argmax((tree.tokens[0] == candidate[-1]) & (tree.depths[0] == 2))
            spread = mx.max(mx.abs(want - mx.mean(want)))
            errors.append(mx.max(mx.abs(got[0, leaf] - want)) / mx.maximum(spread, 1e-6))
        error = mx.max(mx.stack(errors)).astype(mx.float32).item()
        assert isinstance(error, float)
        if tolerance is None:
            tolerance = 1e-3 if got.dtype == mx.float32 else 0.2
        if not error <= tolerance:
            raise _unsupported(
                self.model_type,
                f"a tree's logits differ from the sequence's by {error:.1%} of their range",
            )
        return error


class _NodeRope:
    """A rotary embedding that also takes one position per node: offset [B, N]."""

    def __init__(self, rope: nn.Module) -> None:
        self._rope = rope

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if not isinstance(offset, mx.array) or offset.ndim < 2:
            plain: mx.array = self._rope(x, offset=offset)
            return plain
        B, H, N, size = x.shape
        folded = x.swapaxes(1, 2).reshape(B * N, H, 1, size)
        turned: mx.array = self._rope(folded, offset=offset.reshape(-1))
        return turned.reshape(B, N, H, size).swapaxes(1, 2)


class _HiddenAsInput:
    """Stands where the backbone was: what goes in is the hidden state already."""

    def __init__(self, backbone: nn.Module) -> None:
        self._backbone = backbone

    def __call__(self, hidden: mx.array, *_: object, **__: object) -> mx.array:
        return hidden

    def __getattr__(self, name: str) -> object:
        return getattr(self._backbone, name)


def _unsupported(model_type: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{model_type} cannot be drafted for: {why}; mlx_lm.generate runs it undrafted"
    )


def _find_backbone(model: nn.Module, model_type: str) -> tuple[str, nn.Module]:
    for name in _BACKBONE_NAMES:
        backbone = model.get(name)
        if isinstance(backbone, nn.Module):
            return name, backbone
    raise _unsupported(model_type, "its layers are not a module apart from its output layer")


def _check_cache(model: nn.Module, model_type: str) -> None:
    """Only plain keys and values can be shared by the nodes of a tree."""
    kinds = {type(c) for c in make_prompt_cache(model)}
    args = getattr(model, "args", None)
    latent = getattr(args, "kv_lora_rank", None)
    what = sorted(k.__name__ for k in kinds - {KVCache})
    if latent or what:
        state = "latent attention (MLA)" if latent else " and ".join(what)
        raise _unsupported(
            model_type, f"it keeps {state}, and only plain key/value caches can hold a tree"
        )


def _find_embedding(backbone: nn.Module, model_type: str) -> nn.Module:
    for child in backbone.children().values():
        if isinstance(child, (nn.Embedding, nn.QuantizedEmbedding)):
            return child
    raise _unsupported(model_type, "its token embedding was not found")


def _with_node_positions(module: nn.Module) -> tuple[nn.Module, int]:
    """A copy of the module tree that shares all arrays and whose ropes take node positions.

    Returns the copy and how many rotary embeddings it found.
    """
    found = 0
    copies: dict[int, object] = {}

    def visit(value: object, name: str) -> object:
        nonlocal found
        if isinstance(value, nn.Module):
            if name in _ROPE_NAMES and isinstance(value, _ROPE_TYPES):
                found += 1
                return _NodeRope(value)
            if id(value) not in copies:
                clone = copies[id(value)] = copy.copy(value)
                for key, child in list(value.items()):
                    setattr(clone, key, visit(child, key))
            return copies[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(visit(item, name) for item in value)
        if isinstance(value, dict):
            return {key: visit(item, key) for key, item in value.items()}
        return value

    clone = visit(module, "")
    assert isinstance(clone, nn.Module)
    return clone, found


def _rows_of(layer: nn.Module, tokens: mx.array | None) -> Callable[[mx.array], mx.array]:
    """Rows of an (optionally quantised) embedding or linear layer as an output layer."""

    def rows(name: str) -> mx.array | None:
        array = layer.get(name)
        return array if array is None or tokens is None else array[tokens]

    weight, scales, biases, bias = (rows(n) for n in ("weight", "scales", "biases", "bias"))
    assert weight is not None
    mx.eval([a for a in (weight, scales, biases, bias) if a is not None])

    def apply(x: mx.array) -> mx.array:
        if scales is None:
            y = x @ weight.T
        else:
            y = mx.quantized_matmul(
                x,
                weight,
                scales,
                biases,
                transpose=True,
                group_size=layer.group_size,
                bits=layer.bits,
                mode=layer.mode,
            )
        return y if bias is None else y + bias

    return apply
