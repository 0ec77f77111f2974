"""Merging beams into trees, against slow tries."""

from __future__ import annotations

import math
import random
from typing import cast

import mlx.core as mx
import pytest
import references
from beams import ended_early, living_paths, pack, random_beams
from references import build_trie, kept_paths, packed_paths, prefixes, trie_paths

from redrafter_mlx.bench.measure.packing import final_candidates
from redrafter_mlx.speculation.beams import Beams, join_beams, lineages, owners
from redrafter_mlx.speculation.tree import TokenTree, pack_beam

MARS, IS, A, RED, REDDISH, WHEN, DARK = 1, 2, 3, 4, 5, 6, 7
WORKED_EXAMPLE = [[MARS, IS, A, RED], [MARS, IS, REDDISH, WHEN], [MARS, IS, DARK, RED]]


def dedup_prefix(tokens: list) -> list:
    """Return, for each prefix of candidates [B, W, L], the first candidate that has it."""
    beams = Beams(mx.array(tokens), mx.zeros(mx.array(tokens).shape))
    return cast(list, owners(lineages(beams)).tolist())


def drawn_mask(drawing: str) -> list[list[bool]]:
    return [[c == "Y" for c in line.split()] for line in drawing.split("\n") if line.strip()]


def test_owners_of_the_papers_worked_example() -> None:
    """The drawing of docs/tree_attention.md in the paper's code."""
    assert dedup_prefix([WORKED_EXAMPLE]) == [[[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 2, 2]]]


def test_mask_of_the_papers_worked_example() -> None:
    # Likelier beams come first, as in a beam search, so nodes are ordered by beam.
    scores = [[0, -0.1, -0.2, -0.3], [0, -0.1, -0.4, -0.5], [0, -0.1, -0.6, -0.7]]
    tree = pack([WORKED_EXAMPLE], [scores], 8)
    assert tree.tokens.tolist() == [[MARS, IS, A, RED, REDDISH, WHEN, DARK, RED]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 1, 4, 1, 6]]
    assert tree.depths.tolist() == [[0, 1, 2, 3, 2, 3, 2, 3]]
    drawing = """
        Y . . . . . . .
        Y Y . . . . . .
        Y Y Y . . . . .
        Y Y Y Y . . . .
        Y Y . . Y . . .
        Y Y . . Y Y . .
        Y Y . . . . Y .
        Y Y . . . . Y Y
    """
    assert tree.mask.tolist() == [drawn_mask(drawing)]


@pytest.mark.parametrize("seed", range(40))
def test_owners_equal_the_first_candidate_with_the_same_prefix(seed: int) -> None:
    rng = random.Random(seed)
    B, W, L = rng.randrange(1, 4), rng.randrange(1, 7), rng.randrange(1, 6)
    tokens, _ = random_beams(rng, B, W, L, vocab=rng.choice([1, 2, 3, 50]))
    assert dedup_prefix(tokens) == [references.owners(t) for t in tokens]


@pytest.mark.parametrize("seed", range(60))
def test_packed_tree_equals_the_trie(seed: int) -> None:
    """With room for all, the packed nodes are the trie's nodes, in rows of any shape."""
    rng = random.Random(seed)
    B, W, L = rng.randrange(1, 4), rng.randrange(1, 6), rng.randrange(1, 6)
    tokens, scores = random_beams(rng, B, W, L, vocab=rng.choice([1, 2, 3, 50]))
    tree = pack(tokens, scores, W * L)
    valid = tree.valid.tolist()
    for b in range(B):
        got = packed_paths(tree.tokens[b].tolist(), tree.parents[b].tolist(), valid[b])
        assert set(got) == set(trie_paths(build_trie(tokens[b], scores[b])))
        for path, i in got.items():
            assert tree.depths[b, i].item() == len(path) - 1


@pytest.mark.parametrize("seed", range(60))
def test_a_full_tree_keeps_the_likeliest_nodes_and_is_still_a_tree(seed: int) -> None:
    rng = random.Random(1000 + seed)
    B, W, L = rng.randrange(1, 4), rng.randrange(2, 6), rng.randrange(2, 6)
    N = rng.randrange(1, W * (L - 1) + 1)
    tokens, scores = random_beams(rng, B, W, L, vocab=rng.choice([2, 3, 50]))
    tree = pack(tokens, scores, N)
    assert tree.tokens.shape == (B, N)
    for b in range(B):
        valid = tree.valid[b].tolist()
        paths = packed_paths(tree.tokens[b].tolist(), tree.parents[b].tolist(), valid)
        everything = trie_paths(build_trie(tokens[b], scores[b]))
        assert len(paths) == min(N, len(everything))
        got = sorted((everything[p] for p in paths), reverse=True)
        assert got == sorted(everything.values(), reverse=True)[: len(got)]
        assert set(got) <= kept_paths(tokens[b], scores[b], N)


@pytest.mark.parametrize("seed", range(30))
def test_a_node_attends_to_itself_and_its_ancestors_alone(seed: int) -> None:
    rng = random.Random(2000 + seed)
    tokens, scores = random_beams(rng, 2, 4, 4, vocab=rng.choice([1, 2, 50]))
    tree = pack(tokens, scores, rng.randrange(1, 14))
    N = tree.tokens.shape[1]
    for b in range(2):
        parents = tree.parents[b].tolist()
        for i in range(N):
            allowed, at = {i}, parents[i]
            while at >= 0:
                assert at < i, "a parent comes before its child"
                allowed.add(at)
                at = parents[at]
            got = {j for j in range(N) if tree.mask[b, i, j].item()}
            assert got == allowed


def test_all_equal_beams_become_one_chain() -> None:
    tree = pack([[[9, 8, 7]] * 3], [[[0.0, -1.0, -2.0]] * 3], 7)
    assert tree.valid.tolist() == [[True] * 3 + [False] * 4]
    assert tree.tokens[0, :3].tolist() == [9, 8, 7]
    assert tree.parents.tolist() == [[-1, 0, 1, -1, -1, -1, -1]]


def test_beams_that_share_only_the_root_keep_all_their_nodes() -> None:
    tree = pack([[[9, 1, 2], [9, 3, 4]]], [[[0.0, -1.0, -2.0], [0.0, -1.5, -2.5]]], 5)
    assert tree.tokens.tolist() == [[9, 1, 3, 2, 4]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2]]


def test_one_beam_is_a_chain_of_whatever_length_fits() -> None:
    tree = pack([[[5, 6, 7, 8]]], [[[0.0, -1.0, -2.0, -3.0]]], 3)
    assert tree.is_chain
    assert tree.tokens.tolist() == [[5, 6, 7]]
    assert tree.parents.tolist() == [[-1, 0, 1]]
    assert tree.max_depth == 2


def test_certain_children_do_not_displace_their_parents() -> None:
    """Scores tie all the way down: the parent wins, so every prefix of a packed path is packed."""
    tree = pack([[[1, 2, 3], [1, 4, 5], [1, 6, 7]]], [[[0.0] * 3] * 3], 4)
    assert tree.tokens.tolist() == [[1, 2, 4, 6]]
    assert tree.depths.tolist() == [[0, 1, 1, 1]]


def scored_paths(tree: TokenTree, b: int, score: dict[tuple[int, ...], float]) -> list[float]:
    """Return the scores of the nodes of row b; each node must be in `score`."""
    valid = tree.valid[b].tolist()
    return [
        score[p] for p in packed_paths(tree.tokens[b].tolist(), tree.parents[b].tolist(), valid)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_a_candidate_that_ends_early_has_no_nodes_behind_its_end(seed: int) -> None:
    """Nor does it hide nodes of other candidates there."""
    rng = random.Random(3000 + seed)
    B, W, L = rng.randrange(1, 4), rng.randrange(1, 6), rng.randrange(2, 6)
    tokens, scores = random_beams(rng, B, W, L, vocab=2)
    ended_early(rng, tokens, scores)
    tree = pack(tokens, scores, W * L)
    for b in range(B):
        want = living_paths(tokens[b], scores[b])
        assert sorted(scored_paths(tree, b, want)) == sorted(want.values())


@pytest.mark.parametrize("seed", range(60))
def test_joined_beams_keep_the_likeliest_nodes_of_both_and_are_still_a_tree(seed: int) -> None:
    """Two sources score the same prefixes differently, and some candidates end early."""
    rng = random.Random(4000 + seed)
    B, L, vocab = rng.randrange(1, 4), rng.randrange(2, 6), rng.choice([2, 3])
    parts = []
    for _ in range(2):
        tokens, scores = random_beams(rng, B, rng.randrange(1, 4), L, vocab)
        for row in tokens:
            for candidate in row:
                candidate[0] = 1
        if rng.random() < 0.5:
            ended_early(rng, tokens, scores)
        parts.append((tokens, scores))
    (tokens, scores), (more, others) = parts
    W = len(tokens[0]) + len(more[0])
    N = rng.randrange(1, W * (L - 1) + 2)
    joined = join_beams(*(Beams(mx.array(t), mx.array(s)) for t, s in parts))
    tree = pack_beam(joined, N)
    for b in range(B):
        want = living_paths(tokens[b] + more[b], scores[b] + others[b])
        got = scored_paths(tree, b, want)
        assert sorted(got, reverse=True) == sorted(want.values(), reverse=True)[:N]


def random_search(rng: random.Random, root: int, W: int, L: int, vocab: int) -> tuple:
    """Return prefixes with random parents: some parents have several children, some have none."""
    tokens, parents = [[root] for _ in range(W)], [[0] for _ in range(W)]
    scores = [[0.0] for _ in range(W)]
    for depth in range(1, L):
        for w in range(W):
            before = rng.randrange(W)
            alive = rng.random() < 0.9
            tokens[w].append(rng.randrange(vocab))
            parents[w].append(before)
            step = -rng.choice([0.0, 0.25, rng.random() * 3])
            scores[w].append(scores[before][depth - 1] + step if alive else -math.inf)
    return tokens, scores, parents


@pytest.mark.parametrize("seed", range(60))
def test_prefixes_without_children_are_merged_and_packed_like_all_others(seed: int) -> None:
    """Two searches in one tree, compared with a dictionary of their prefixes."""
    rng = random.Random(5000 + seed)
    L, vocab = rng.randrange(2, 6), rng.choice([2, 3, 20])
    searches = [random_search(rng, 1, rng.randrange(1, 5), L, vocab) for _ in range(2)]
    N = rng.randrange(1, sum(len(tokens) for tokens, *_ in searches) * (L - 1) + 2)
    best: dict[tuple[int, ...], float] = {}
    for tokens, scores, parents in searches:
        for depth, level in enumerate(prefixes(tokens, parents)):
            for w, path in enumerate(level):
                if scores[w][depth] > -math.inf:
                    best[path] = max(best.get(path, -math.inf), scores[w][depth])
    first, second = (Beams(*(mx.array([part]) for part in search)) for search in searches)
    tree = pack_beam(join_beams(first, second), N)
    got = scored_paths(tree, 0, best)
    assert sorted(got, reverse=True) == pytest.approx(sorted(best.values(), reverse=True)[:N])


def test_the_two_packings_of_the_worked_example() -> None:
    """The drawing of `final_candidates`: `red` is in the search, but no candidate extends it."""
    beams = Beams(
        tokens=mx.array([[[MARS, IS, A], [MARS, RED, DARK]]]),
        log_probs=mx.array([[[0, -0.1, -0.3], [0, -0.7, -0.8]]]),
        parents=mx.array([[[0, 0, 0], [0, 0, 0]]]),
    )
    whole, final = pack_beam(beams, 5), pack_beam(final_candidates(beams), 5)
    assert whole.tokens.tolist() == [[MARS, IS, A, RED, DARK]]
    assert whole.parents.tolist() == [[-1, 0, 1, 0, 1]]
    assert final.tokens[0, :4].tolist() == [MARS, IS, A, DARK]
    assert final.parents.tolist() == [[-1, 0, 1, 1, -1]]
    assert whole.mask.tolist() == [
        drawn_mask("""
            Y . . . .
            Y Y . . .
            Y Y Y . .
            Y . . Y .
            Y Y . . Y
        """)
    ]
    assert final.mask.tolist() == [
        drawn_mask("""
            Y . . . .
            Y Y . . .
            Y Y Y . .
            Y Y . Y .
            . . . . Y
        """)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_final_candidates_pack_to_the_prefixes_of_the_last_ones(seed: int) -> None:
    """The paper's tree of two searches, found by following the parents of each last prefix."""
    rng = random.Random(6000 + seed)
    L, vocab = rng.randrange(2, 6), rng.choice([2, 3, 20])
    searches = [random_search(rng, 1, rng.randrange(1, 4), L, vocab) for _ in range(2)]
    best: dict[tuple[int, ...], float] = {}
    final: set[tuple[int, ...]] = set()
    for tokens, scores, parents in searches:
        levels = prefixes(tokens, parents)
        for depth, level in enumerate(levels):
            for path, row in zip(level, scores, strict=True):
                best[path] = max(best.get(path, -math.inf), row[depth])
        for number in range(len(tokens)):
            for depth in range(L - 1, -1, -1):
                if scores[number][depth] > -math.inf:
                    final.add(levels[depth][number])
                number = parents[number][depth]
    W = sum(len(tokens) for tokens, *_ in searches)
    N = rng.choice([W * (L - 1) + 1, rng.randrange(1, W * (L - 1) + 2)])
    first, second = (Beams(*(mx.array([part]) for part in search)) for search in searches)
    tree = pack_beam(final_candidates(join_beams(first, second)), N)
    got = scored_paths(tree, 0, {path: best[path] for path in final})
    want = sorted((best[path] for path in final), reverse=True)
    assert sorted(got, reverse=True) == pytest.approx(want[:N])
