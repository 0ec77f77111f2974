"""A check at load time that a model is exact on trees."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from redrafter_mlx.errors import BadInputError
from redrafter_mlx.speculation.sampling import log_softmax
from redrafter_mlx.speculation.tree import Beams, pack_beam
from redrafter_mlx.target.adapter import unsupported
from redrafter_mlx.target.model import Target

_NOISE_FACTOR = 4.0
"""Errors up to this multiple of the noise are treated as rounding: three texts show only part of
the noise. Defects are hundreds of times as large."""

_FAILURES = (TypeError, ValueError, AttributeError, IndexError, KeyError, NotImplementedError)
"""Exceptions of models whose code does not work on trees."""


def check_trees(target: Target) -> float:
    """Compare the leaves of a small tree with mlx-lm's own sequential calls.

    The yardstick is the noise between mlx-lm's own calls with one query row per text and with
    several, so half precision and TF32 need no tolerance of their own. The check takes five calls
    of the model.

    Returns:
      the difference of the leaves' log-probabilities, as a share of their spread
    Raises:
      UnsupportedModelError: they differ by more than the noise, or the model fails on a tree,
        as an architecture whose attention works differently would
      BadInputError: the model's own logits are not finite
    """
    V = target.vocab_size
    prompt = [t % V for t in (1, 5, 2, 7, 23, 81, 46, 13)]
    candidates = [[t % V for t in row] for row in ((3, 11, 4), (3, 12, 9), (3, 11, 8))]
    texts = mx.array([prompt + candidate for candidate in candidates])
    single, several = (
        _last_log_probs(target.plain, texts, known) for known in (texts.shape[1] - 1, 0)
    )
    spread = _rms(single - mx.mean(single, axis=-1, keepdims=True))
    if not mx.all(mx.isfinite(spread)).item():
        raise BadInputError(
            f"{target.model_type}'s logits are not finite in {str(target.dtype).split('.')[-1]}: "
            f"its weights are damaged, or it needs another dtype"
        )
    try:
        leaves = _leaves(target, prompt, candidates)
        mx.eval(leaves)
    except _FAILURES as failure:  # the model itself has just read these texts
        reason = " ".join(f"{type(failure).__name__}: {failure}".split())
        raise unsupported(target.model_type, f"it fails on a tree ({reason})") from failure
    # The median: nearly tied experts can swap in one leaf, but a defect affects all leaves.
    error = mx.median(_rms(leaves - single) / spread).item()
    noise = mx.max(_rms(several - single) / spread).item()
    assert isinstance(error, float)
    assert isinstance(noise, float)
    allowed = _NOISE_FACTOR * (noise + mx.finfo(target.dtype).eps)
    if not error <= allowed:
        raise unsupported(
            target.model_type,
            f"a tree's logits differ from the sequence's by {error:.1e} of their spread; rounding "
            f"explains {allowed:.1e}",
        )
    return error


def _last_log_probs(model: nn.Module, texts: mx.array, known: int) -> mx.array:
    """Return log-probabilities [W, V] after texts [W, P], from mlx-lm's own model and cache.

    The first `known` tokens are read in one call, the others in a second call.
    """
    cache = make_prompt_cache(model)
    if known:
        mx.eval(model(texts[:, :known], cache=cache))
    log_probs = log_softmax(model(texts[:, known:], cache=cache)[:, -1])
    mx.eval(log_probs)
    return log_probs


def _leaves(target: Target, prompt: list[int], candidates: list[list[int]]) -> mx.array:
    """Return log-probabilities [W, V] after a prompt and each candidate [W, L], from one tree."""
    W, L = len(candidates), len(candidates[0])
    scores = -mx.arange(L) - 0.1 * mx.arange(W)[:, None]
    tree = pack_beam(Beams(mx.array([candidates]), scores[None]), W * (L - 1) + 1)
    tokens = cast("list[int]", tree.tokens[0].tolist())
    parents = cast("list[int]", tree.parents[0].tolist())
    paths: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    cache = target.new_cache()
    target.prefill(mx.array([prompt]), cache, 0, [len(prompt) - 1])
    _, logits = target.verify(tree, cache, mx.array([len(prompt)]), len(prompt))
    return log_softmax(logits[0])[mx.array([paths.index(c) for c in candidates])]


def _rms(x: mx.array) -> mx.array:
    """Return the root mean square of each row."""
    return mx.sqrt(mx.mean(mx.square(x), axis=-1))
