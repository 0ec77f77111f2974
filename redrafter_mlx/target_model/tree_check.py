"""A check at load time that a model is exact on trees."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from redrafter_mlx.errors import BadInputError, device_failures_explained
from redrafter_mlx.runtime.device import dtype_name, float32_is_exact
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.sampling import log_softmax
from redrafter_mlx.speculation.tree import TokenTree, pack_beam
from redrafter_mlx.target_model.adapter import unsupported, unsupported_if_failing
from redrafter_mlx.target_model.model import Target

_NOISE_FACTOR = 4.0
"""Errors up to this multiple of the noise are treated as rounding: three texts show only part of
the noise. Defects are hundreds of times as large."""

_SMALL = 1e-5
"""Maximum error of float32 products that is rounding whatever the noise, which is not measured."""

_TF32 = 2.0**-11
"""Relative rounding error of a factor in TF32."""


@device_failures_explained()
def check_trees(target: Target) -> float:
    """Compare a prompt, a tree, and a batch of both forms with mlx-lm's own sequential calls.

    The yardstick is the noise between mlx-lm's own calls with one query row per text and with
    several, and the rounding of a number: with TF32 that of its factors, because CUDA multiplies
    some counts of rows in TF32 and others in float32. The check takes six calls of the model, and
    another one for the noise, unless all errors are too small to be anything but rounding.

    Returns:
      the largest difference of log-probabilities, as a share of their spread
    Raises:
      UnsupportedModelError: they differ by more than the noise, or the model fails on a tree,
        as an architecture whose attention works differently would
      BadInputError: the model's own logits are not finite
      BusyError: the device failed
    """
    V = target.vocab_size
    prompt = [t % V for t in (1, 5, 2, 7, 23, 81, 46, 13)]
    candidates = [[t % V for t in row] for row in ((3, 11, 4), (3, 12, 9), (3, 11, 8))]
    texts = mx.array([prompt + candidate for candidate in candidates])
    first, last = logits_of(target.plain, texts[:, :-1], texts[:, -1:])
    read, single = log_softmax(first[0, : len(prompt)]), log_softmax(last[:, -1])
    mx.eval(read, single)
    if not mx.all(mx.isfinite(single)).item():
        raise BadInputError(
            f"{target.model_type}'s logits are not finite in {dtype_name(target.dtype)}: "
            f"its weights are damaged, or it needs another dtype"
        )
    with unsupported_if_failing(target.model_type, "a tree"):
        prompts, tree, chains, trees = _called(target, prompt, candidates)
        mx.eval(prompts, tree, chains, trees)
    # The median: nearly tied experts can swap in one text, but a defect affects all texts.
    errors = {
        "prompt": _number(mx.median(_differences(prompts, read))),
        "tree": _number(mx.median(_differences(tree, single))),
        "batch of chains": _number(mx.median(_differences(chains, single))),
        "batch of trees": _number(mx.median(_differences(trees, single))),
    }
    exact = target.dtype == mx.float32 and float32_is_exact()
    if exact and all(error <= _SMALL for error in errors.values()):
        return max(errors.values())
    (together,) = logits_of(target.plain, texts)
    noise = _number(mx.max(_differences(log_softmax(together[:, -1]), single)))
    rounding = max(mx.finfo(target.dtype).eps, 0.0 if float32_is_exact() else _TF32)
    allowed = _NOISE_FACTOR * (noise + rounding)
    for what, error in errors.items():
        if not error <= allowed:
            raise unsupported(
                target.model_type,
                f"a {what}'s logits differ from the sequence's by {error:.1e} of their spread; "
                f"rounding explains {allowed:.1e}",
            )
    return max(errors.values())


def logits_of(model: nn.Module, *parts: mx.array) -> list[mx.array]:
    """Return logits [W, P, V] in each part [W, P] of some texts, from mlx-lm's model and cache.

    One call reads one part.
    """
    cache, logits = make_prompt_cache(model), []
    for tokens in parts:
        logits.append(model(tokens, cache=cache))
        mx.eval([layer.state for layer in cache])
    return logits


def _called(target: Target, prompt: list[int], candidates: list[list[int]]) -> tuple[mx.array, ...]:
    """Return log-probabilities in a prompt, and after it and each of three candidates.

    The candidates are in one tree, in chains of a batch, and in trees of a batch. The batch rows
    differ in length: the first token of two of them is committed.

    Returns:
      [P, V] in the prompt, and [3, V] for each of the others
    """
    cache, P = target.new_cache(), len(prompt)
    hidden = target.append(mx.array([prompt]), cache, 0)
    before = cache.take(mx.array([0]))
    tree, nodes = _tree([candidates])
    _, logits = target.verify(tree, cache, mx.array([P]), P)
    of_tree = [logits[0, nodes[0][tuple(candidate)]] for candidate in candidates]
    length = cache.commit(tree, mx.zeros((1, 3), mx.int32), mx.array([0]), mx.array([P]))
    rows = type(cache).joined([before, cache.take(mx.array([0, 0]))])
    first, second, third = candidates
    lengths = mx.concatenate([mx.array([P]), length, length])
    batches = []
    for beams in (
        [[first], [[*second[1:], 0]], [[*third[1:], 0]]],
        [candidates, [[*second[1:], 0]] * 3, [[*first[1:], 0], [*third[1:], 0], [*first[1:], 1]]],
    ):
        tree, nodes = _tree(beams)
        _, logits = target.verify(tree, rows, lengths, P + 1, False)
        paths = (tuple(first), tuple(second[1:]), tuple(third[1:]))
        batches.append(mx.stack([logits[b, nodes[b][path]] for b, path in enumerate(paths)]))
    found = (target.logits(hidden)[0], mx.stack(of_tree), *batches)
    return tuple(log_softmax(logits) for logits in found)


def _tree(beams: list[list[list[int]]]) -> tuple[TokenTree, list[dict[tuple[int, ...], int]]]:
    """Pack beams [B, W, L]; return the tree, and the node of each path for each row."""
    tokens = mx.array(beams)
    _, W, L = tokens.shape
    scores = -mx.arange(L) - 0.1 * mx.arange(W)[:, None]
    tree = pack_beam(Beams(tokens, mx.broadcast_to(scores, tokens.shape)), W * (L - 1) + 1)
    found: list[dict[tuple[int, ...], int]] = []
    for row, above in zip(
        cast("list[list[int]]", tree.tokens.tolist()),
        cast("list[list[int]]", tree.parents.tolist()),
        strict=True,
    ):
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(row, above, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        found.append({path: node for node, path in reversed([*enumerate(paths)])})
    return tree, found


def _differences(found: mx.array, wanted: mx.array) -> mx.array:
    """Return the difference of each row's log-probabilities, as a share of their spread."""
    return _rms(found - wanted) / _rms(wanted - mx.mean(wanted, axis=-1, keepdims=True))


def _number(x: mx.array) -> float:
    number = x.item()
    assert isinstance(number, float)
    return number


def _rms(x: mx.array) -> mx.array:
    """Return the root mean square of each row."""
    return mx.sqrt(mx.mean(mx.square(x), axis=-1))
