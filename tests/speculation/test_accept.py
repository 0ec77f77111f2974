"""Acceptance along the target's choices, against a walk that goes node by node."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from beams import pack, random_beams
from references import walk

from redrafter_mlx.speculation.accept import accept


@pytest.mark.parametrize("seed", range(80))
def test_the_accepted_path_equals_the_walk_from_node_to_node(seed: int) -> None:
    rng = random.Random(seed)
    B, W, L = rng.randrange(1, 4), rng.randrange(1, 5), rng.randrange(1, 6)
    tokens, scores = random_beams(rng, B, W, L, vocab=3)
    tree = pack(tokens, scores, rng.randrange(1, W * (L - 1) + 2))
    N = tree.tokens.shape[1]
    choices = [[rng.randrange(3) for _ in range(N)] for _ in range(B)]
    got = accept(tree, mx.array(choices))
    for b in range(B):
        path, bonus = walk(
            tree.tokens[b].tolist(), tree.parents[b].tolist(), tree.valid[b].tolist(), choices[b]
        )
        n = got.n_accepted[b].item()
        assert got.path[b].tolist()[: n + 1] == path
        assert n + 1 == len(path)
        assert got.bonus[b].item() == bonus
        assert got.last[b].item() == path[-1]
        assert got.emitted[b].tolist()[: n + 1] == [choices[b][i] for i in path]


def test_every_accepted_length_occurs() -> None:
    tree = pack([[[0, 1, 2, 3]]], [[[0.0, -1.0, -2.0, -3.0]]], 4)
    for n in range(4):
        choices = [1, 2, 3, 9]
        if n < 3:
            choices[n] = 9
        got = accept(tree, mx.array([choices]))
        assert got.n_accepted.item() == n
        assert got.bonus.item() == 9


def test_padding_accepts_nothing() -> None:
    """Equal beams leave padding with token 0; a choice of token 0 must not lead there."""
    tree = pack([[[5, 6], [5, 6], [5, 6]]], [[[0.0, -1.0]] * 3], 4)
    got = accept(tree, mx.array([[0, 0, 0, 0]]))
    assert got.n_accepted.item() == 0
    assert got.path[0, 0].item() == 0
