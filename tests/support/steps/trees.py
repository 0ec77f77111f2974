"""Trees beside one sequence at a time, and the slots of a cache."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.tree import TokenTree, pack_beam
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.model import Target

BEAMS = [[4, 5, 6, 7], [4, 5, 8, 9], [4, 10, 6, 7]]
SCORES = [[0.0, -0.1, -0.3, -0.4], [0.0, -0.1, -0.5, -0.6], [0.0, -0.7, -0.8, -0.9]]
PROMPTS = [[11, 12, 13, 14, 15], [21, 22, 23]]


def tree_for(batch: int, max_nodes: int = 12) -> TokenTree:
    """Return a tree with rows of different shape: the second row's beams agree for longer."""
    second = [[4, 5, 6, 7], [4, 5, 6, 9], [4, 5, 6, 3]]
    tokens = [BEAMS, second][:batch]
    scores = [SCORES, [[0.0, -0.1, -0.3, s] for s in (-0.4, -0.5, -0.6)]][:batch]
    return pack_beam(Beams(mx.array(tokens), mx.array(scores)), max_nodes)


def sequential_logits(model: nn.Module, tokens: list[int]) -> np.ndarray:
    """Return mlx-lm's logits after the last token of a plain sequence, with its own cache."""
    out = model(mx.array([tokens]), cache=make_prompt_cache(model))
    return np.array(out[0, -1].astype(mx.float32))


def assert_tree_equals_sequences(
    model: nn.Module, batch: int, rtol: float, prompts: list[list[int]] = PROMPTS
) -> None:
    target = Target(model)
    tree = tree_for(batch)
    cache = target.new_cache()
    prompts = prompts[:batch]
    width = max(map(len, prompts))
    padded = mx.array([p + [0] * (width - len(p)) for p in prompts])
    target.append(padded, cache, 0)
    length = mx.array([len(p) for p in prompts])
    hidden, logits = target.verify(tree, cache, length, width)
    assert hidden.shape[-1] == target.hidden_size
    for b, prompt in enumerate(prompts):
        paths: list[list[int]] = []
        valid = tree.valid[b].tolist()
        for i, (token, parent) in enumerate(
            zip(tree.tokens[b].tolist(), tree.parents[b].tolist(), strict=True)
        ):
            paths.append([token] if i == 0 else [*paths[parent], token])
            if not valid[i]:
                continue
            want = sequential_logits(model, prompt + paths[i])
            got = np.array(logits[b, i].astype(mx.float32))
            assert np.abs(got - want).max() <= rtol * np.abs(want).max(), (b, i)


def slots(cache: TreeCache, row: int, length: int) -> list[np.ndarray]:
    return [
        np.array(a[row, :, :length])
        for c in cache.layers
        for a in (c.keys, c.values)
        if a is not None
    ]


def prefilled_slots(target: Target, tokens: list[int]) -> list[np.ndarray]:
    cache = target.new_cache()
    target.append(mx.array([tokens]), cache, 0)
    return slots(cache, 0, len(tokens))
