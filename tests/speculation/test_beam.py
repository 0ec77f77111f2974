"""Beam search in the drafter, against one that keeps Python lists."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import references
from beams import log_probs_along
from tiny import HIDDEN, VOCAB, random_drafter, random_model

from redrafter_mlx.bench.measure.packing import final_candidates, pack_separately
from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.recurrent import RecurrentDrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.speculation.beam_search import beam_search, top_k
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.tree import pack_beam
from redrafter_mlx.target_model.model import Target


def search(bound: RecurrentDrafter, context: mx.array, root: mx.array, shape: BeamShape) -> Beams:
    return beam_search(bound.levels_of(context, root, shape.length - 1), root, shape)


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
    beams = search(bound, context, mx.array(roots), BeamShape(W, L))
    assert beams.tokens.shape == beams.log_probs.shape == (2, W, L)
    for b, root in enumerate(roots):
        levels = references.beam_search(
            lambda path, b=b: log_probs_along(bound, context[b], path), root, W, L
        )
        found = references.prefixes(beams.tokens[b].tolist(), beams.parent_indices[b].tolist())
        for depth, want in enumerate(levels):
            assert found[depth][: len(want)] == [p for p, _ in want]
            scores = beams.log_probs[b, : len(want), depth].tolist()
            np.testing.assert_allclose(scores, [s for _, s in want], rtol=1e-4, atol=1e-4)


def test_scores_never_rise_from_a_prefix_to_its_children() -> None:
    bound = random_drafter().bind(Target(random_model()))
    beams = search(bound, mx.ones((1, HIDDEN)) * 50, mx.array([3]), BeamShape(4, 5))
    before = mx.take_along_axis(beams.log_probs[..., :-1], beams.parent_indices[..., 1:], axis=1)
    assert mx.all(beams.log_probs[..., 1:] <= before).item()
    assert mx.all(beams.log_probs[..., 0] == 0).item()


def test_every_prefix_of_the_search_is_a_node_though_nothing_continues_it() -> None:
    """So a full tree has no padding, and a wide tree keeps all first drafts."""
    bound = random_drafter(seed=2).bind(Target(random_model()))
    beams = search(bound, mx.ones((1, HIDDEN)), mx.array([3]), BeamShape(4, 4))
    tree = pack_beam(beams, 13)
    assert mx.all(tree.valid).item()
    levels = references.prefixes(beams.tokens[0].tolist(), beams.parent_indices[0].tolist())
    parents, valid = tree.parents[0].tolist(), tree.valid[0].tolist()
    packed = references.packed_paths(tree.tokens[0].tolist(), parents, valid)
    assert set(packed) == {prefix for level in levels for prefix in level}
    abandoned = set(levels[1]) - {prefix[:2] for prefix in levels[3]}
    assert abandoned, "this search extended all its prefixes, which shows nothing"
    for path, node in packed.items():
        numbers = [levels[n - 1].index(path[:n]) for n in range(1, len(path) + 1)]
        assert tree.beams[0, node].item() == max(numbers)


@pytest.mark.parametrize("nodes", [2, 6, 13])
@pytest.mark.parametrize("prefixes", ["all", "final"])
def test_a_search_packs_as_if_its_prefixes_might_be_equal(nodes: int, prefixes: str) -> None:
    """Packing may skip the comparison of the prefixes: one search finds none twice."""
    bound = random_drafter().bind(Target(random_model()))
    beams = search(bound, mx.random.normal((3, HIDDEN)), mx.array([3, 9, 3]), BeamShape(4, 4))
    if prefixes == "final":
        beams = final_candidates(beams)
    assert beams.distinct
    fast, slow = pack_beam(beams, nodes), pack_beam(beams._replace(distinct=False), nodes)
    assert mx.array_equal(fast.valid, slow.valid).item()
    for one, other in zip(fast.arrays, slow.arrays, strict=True):
        there = fast.valid if one.ndim == 2 else fast.valid[:, :, None]
        assert mx.all((one == other) | ~there).item()


@pytest.mark.parametrize("ended", [0, 1])
def test_separate_candidates_are_branches_that_share_the_root_alone(ended: int) -> None:
    """If the first candidate ends early, its missing nodes are padding, after all other nodes."""
    bound = random_drafter(seed=2).bind(Target(random_model()))
    W, L = 4, 4
    beams = search(bound, mx.ones((1, HIDDEN)), mx.array([3]), BeamShape(W, L))
    last = references.prefixes(beams.tokens[0].tolist(), beams.parent_indices[0].tolist())[-1]
    lengths = [L - ended, L, L, L]
    for level in range(L - ended, L):
        beams.log_probs[0, 0, level] = -mx.inf
    tree = pack_separately(beams, W * (L - 1) + 1)
    valid, parents = tree.valid[0].tolist(), tree.parents[0].tolist()
    assert valid == sorted(valid, reverse=True)
    paths, tokens = [], tree.tokens[0].tolist()
    for node in range(sum(valid)):
        on_path = [j for j in range(len(valid)) if tree.mask[0, node, j].item()]
        depths = [tree.depths[0, j].item() for j in on_path]
        assert depths == list(range(len(on_path)))
        assert parents[node] == (on_path[-2] if node else -1)
        paths.append(tuple(tokens[j] for j in on_path))
    want = [tuple(c[:n]) for c, most in zip(last, lengths, strict=True) for n in range(2, most + 1)]
    assert paths[1:] == want
    assert len(valid) == W * (L - 1) + 1


def test_a_drafter_that_computes_nan_still_gives_a_tree() -> None:
    bound = random_drafter().bind(Target(random_model()))
    beams = search(bound, mx.full((1, HIDDEN), mx.nan), mx.array([3]), BeamShape(3, 4))
    tree = pack_beam(beams, 8)
    assert tree.tokens[0, 0].item() == 3
    assert all(p < i for i, p in enumerate(tree.parents[0].tolist()))


def test_a_beam_wider_than_the_draft_vocabulary_is_refused_by_name() -> None:
    bound = random_drafter(draft_vocab_size=2).bind(Target(random_model()))
    with pytest.raises(BadInputError, match=r"beam_width is 3.*\b2\b"):
        search(bound, mx.zeros((1, HIDDEN)), mx.array([3]), BeamShape(3, 4))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 30])
def test_top_k_equals_sorting(k: int) -> None:
    mx.random.seed(k)
    x = mx.random.normal((3, 30))
    values, index = top_k(x, k)
    want = np.sort(np.array(x), axis=-1)[:, ::-1][:, :k]
    np.testing.assert_array_equal(np.array(values), want)
    np.testing.assert_array_equal(np.take_along_axis(np.array(x), np.array(index), -1), want)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("size", [40_000, 65_536, 3 * 12_345])
@pytest.mark.parametrize("distinct", [3, 10_000])
def test_the_largest_of_many_values_are_the_first_of_equal_ones(
    k: int, size: int, distinct: int
) -> None:
    x = np.random.default_rng(k).integers(distinct, size=(2, size)).astype(np.float32)
    x[:, ::3] = -np.inf
    x[1, 10:] = -np.inf
    values, index = top_k(mx.array(x), k)
    want = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(np.array(index), want)
    np.testing.assert_array_equal(np.array(values), np.take_along_axis(x, want, -1))


@pytest.mark.parametrize("k", [5, 10, 100])
def test_wide_beams_find_the_largest_of_many_values(k: int) -> None:
    x = np.random.default_rng(k).normal(size=(2, 51_200)).astype(np.float32)
    values, index = top_k(mx.array(x), k)
    np.testing.assert_array_equal(np.array(values), -np.sort(-x, axis=-1)[:, :k])
    np.testing.assert_array_equal(np.take_along_axis(x, np.array(index), -1), np.array(values))


@pytest.mark.parametrize("k", [2, 3, 4, 5])
@pytest.mark.parametrize("finite", [0, 1, 2])
def test_top_k_takes_nothing_twice_where_little_is_finite(k: int, finite: int) -> None:
    x = mx.full((1, 8), -mx.inf)
    x[0, 5 : 5 + finite] = mx.arange(finite).astype(mx.float32) + 1
    values, index = top_k(x, k)
    assert len(set(index[0].tolist())) == k  # type: ignore[arg-type]
    assert values[0].tolist() == sorted(x[0].tolist(), reverse=True)[:k]  # type: ignore[arg-type, type-var]


def test_a_narrow_beam_sorts_nothing_over_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    def sort(*_: object, **__: object) -> None:
        raise AssertionError("a sort over the vocabulary")

    for name in ("argpartition", "argsort", "partition", "sort", "topk"):
        monkeypatch.setattr(mx, name, sort)
    for k in (1, 2, 3, 4):
        mx.eval(top_k(mx.zeros((1, 100)), k))
    with pytest.raises(AssertionError):
        top_k(mx.zeros((1, 100)), 5)
