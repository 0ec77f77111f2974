"""The likeliest nodes that a search finds, against those of all trees."""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.level_drafter import IndependentLevels, NoisyLevels
from redrafter_mlx.speculation.beam_search import Levels, beam_search
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.speculation.sampling import Draws
from redrafter_mlx.speculation.tree import TokenTree, pack_beam

V, DEPTH, B = 12, 3, 3
ROOT = mx.array([1, 2, 3])

Path = tuple[int, ...]


def levels_of(marginals: np.ndarray) -> IndependentLevels:
    """Return levels with these log-probabilities [B, DEPTH, V]."""
    logits = mx.array(marginals, mx.float32)
    return IndependentLevels(DraftVocabulary(V, V), list(mx.split(logits, DEPTH, axis=1)))


def random_marginals(seed: int) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(B, DEPTH, V)) * 2
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


class MarkovLevels(Levels):
    """Levels that depend on the token before, by a table [DEPTH, V, V] of log-probabilities."""

    def __init__(self, table: np.ndarray) -> None:
        super().__init__(DraftVocabulary(V, V))
        self._table, self._depth = mx.array(table, mx.float32), 0

    def first(self) -> mx.array:
        return self._table[0, ROOT][:, None]

    def following(self, parents: mx.array, tokens: mx.array) -> mx.array:
        del parents
        self._depth += 1
        return self._table[self._depth, tokens]


def best_paths(table: np.ndarray, root: int, nodes: int) -> set[Path]:
    """Return the `nodes` likeliest paths after the root, of all that exist."""

    def score(path: Path) -> float:
        steps = zip((root, *path), path, strict=False)
        return float(sum(table[depth, t, u] for depth, (t, u) in enumerate(steps)))

    every = [path for n in range(1, DEPTH + 1) for path in product(range(V), repeat=n)]
    return {*sorted(every, key=score)[-nodes:]}


def paths_of(tree: TokenTree, row: int) -> set[Path]:
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    paths: list[Path] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):  # type: ignore[arg-type,call-overload]
        paths.append((*paths[parent], token) if parent >= 0 else ())
    return {*paths} - {()}


@pytest.mark.parametrize("nodes", [2, 6, 13])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dependent", [False, True])
def test_as_many_beams_as_drafts_give_the_best_tree_of_all(
    dependent: bool, seed: int, nodes: int
) -> None:
    """It has the likeliest paths, so that of all trees the most drafts are expected accepted."""
    marginals = random_marginals(seed)
    levels: Levels = levels_of(marginals)
    tables = np.repeat(marginals[:, :, None], V, axis=2)
    if dependent:
        steps = np.random.default_rng(seed).normal(size=(DEPTH, V, V)) * 2
        table = steps - np.log(np.exp(steps).sum(axis=-1, keepdims=True))
        levels, tables = MarkovLevels(table), np.repeat(table[None], B, axis=0)
    tree = pack_beam(beam_search(levels, ROOT, BeamShape(nodes - 1, DEPTH + 1, nodes)), nodes)
    for row, root in enumerate(ROOT.tolist()):  # type: ignore[arg-type]
        assert paths_of(tree, row) == best_paths(tables[row], root, nodes - 1)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("width", [1, 3, 5])
def test_a_search_of_independent_levels_finds_what_any_search_finds(
    width: int, noisy: bool
) -> None:
    marginals = random_marginals(7)
    noise = mx.array(np.random.default_rng(8).gumbel(size=(B, DEPTH + 1, V)), mx.float32)
    draws = Draws(noise, mx.array([0.5, 1.0, 2.0]))
    found = []
    for independent in (True, False):
        levels = levels_of(marginals)
        levels.independent = independent
        searched = NoisyLevels(levels, draws) if noisy else levels
        found.append(beam_search(searched, ROOT, BeamShape(width, DEPTH + 1)))
    for mine, general in zip(found[0][:3], found[1][:3], strict=True):
        np.testing.assert_allclose(mine, general, atol=1e-5)
