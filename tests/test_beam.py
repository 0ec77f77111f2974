"""Beam search in the drafter, against one that keeps Python lists."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import references
from tiny import HIDDEN, VOCAB, random_drafter, random_model

from redrafter_mlx.beam import beam_search, top_k
from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafter import BoundDrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.sampling import log_softmax
from redrafter_mlx.target import Target


def log_probs_along(bound: BoundDrafter, context: mx.array, path: tuple[int, ...]) -> list[float]:
    """The drafter's distribution behind a path of tokens, one token at a time, by token id."""
    state = mx.zeros((1, 1, HIDDEN))
    for token in path:
        state = bound.advance(state, mx.array([[token]]))
    row = log_softmax(bound.logits(context[None, None], state, len(path)))[0, 0].tolist()
    if bound.tokens is None:
        return row
    full = [-1e9] * VOCAB
    for token, value in zip(bound.tokens.tolist(), row, strict=True):
        full[token] = value
    return full


@pytest.mark.parametrize("rnn", [True, False])
@pytest.mark.parametrize(
    "head", [{}, {"head": "tied", "exit_dim": HIDDEN}, {"draft_vocab_size": 20}, {"exit_dim": 64}]
)
@pytest.mark.parametrize(("W", "L"), [(1, 4), (2, 3), (4, 2), (3, 5), (2, 1)])
def test_beam_search_equals_a_search_over_lists(rnn: bool, head: dict, W: int, L: int) -> None:
    target = Target(random_model())
    drafter = random_drafter(rnn=rnn, **head)
    if "draft_vocab_size" in head:
        drafter.draft_vocab = mx.arange(VOCAB - 1, VOCAB - 21, -1)
    bound = drafter.bind(target)
    mx.random.seed(1)
    context = mx.random.normal((2, HIDDEN))
    roots = [3, 50]
    beams = beam_search(bound, context, mx.array(roots), BeamShape(W, L))
    assert beams.tokens.shape == beams.log_probs.shape == (2, W, L)
    for b, root in enumerate(roots):
        want = references.beam_search(
            lambda path, b=b: log_probs_along(bound, context[b], path), root, W, L
        )
        assert [tuple(t) for t in beams.tokens[b].tolist()][: len(want)] == [p for p, _ in want]
        np.testing.assert_allclose(
            beams.log_probs[b, : len(want), -1].tolist(), [s for _, s in want], rtol=1e-4, atol=1e-4
        )


def test_scores_never_rise_along_a_candidate() -> None:
    bound = random_drafter().bind(Target(random_model()))
    beams = beam_search(bound, mx.ones((1, HIDDEN)) * 50, mx.array([3]), BeamShape(4, 5))
    assert mx.all(beams.log_probs[..., 1:] <= beams.log_probs[..., :-1]).item()
    assert mx.all(beams.log_probs[..., 0] == 0).item()


def test_a_drafter_that_computes_nan_still_gives_a_tree() -> None:
    from redrafter_mlx.tree import pack_beam

    bound = random_drafter().bind(Target(random_model()))
    beams = beam_search(bound, mx.full((1, HIDDEN), mx.nan), mx.array([3]), BeamShape(3, 4))
    tree = pack_beam(beams, 8)
    assert tree.tokens[0, 0].item() == 3
    assert all(p < i for i, p in enumerate(tree.parents[0].tolist()))


def test_a_beam_wider_than_the_draft_vocabulary_is_refused_by_name() -> None:
    bound = random_drafter(draft_vocab_size=2).bind(Target(random_model()))
    with pytest.raises(BadInputError, match=r"beam_width is 3.*only 2 tokens"):
        beam_search(bound, mx.zeros((1, HIDDEN)), mx.array([3]), BeamShape(3, 4))


@pytest.mark.parametrize("k", [1, 2, 5, 30])
def test_top_k_equals_sorting(k: int) -> None:
    mx.random.seed(k)
    x = mx.random.normal((3, 30))
    values, index = top_k(x, k)
    want = np.sort(np.array(x), axis=-1)[:, ::-1][:, :k]
    np.testing.assert_array_equal(np.array(values), want)
    np.testing.assert_array_equal(np.take_along_axis(np.array(x), np.array(index), -1), want)
