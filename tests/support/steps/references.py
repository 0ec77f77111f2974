"""Slow, obvious references that the fast path must equal. Plain Python, no MLX operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Trie:
    """A node of a prefix tree: its token, its score, and its children by token."""

    token: int
    score: float
    depth: int = 0
    children: dict[int, Trie] = field(default_factory=dict)


def build_trie(tokens: list[list[int]], scores: list[list[float]]) -> Trie:
    """Merge all candidates of one batch row by their prefixes."""
    root = Trie(tokens[0][0], scores[0][0])
    for candidate, score in zip(tokens, scores, strict=True):
        node = root
        for depth in range(1, len(candidate)):
            token = candidate[depth]
            node = node.children.setdefault(token, Trie(token, score[depth], depth))
    return root


def trie_paths(node: Trie, prefix: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
    """Return every node of a trie by the tokens from the root to it, with its score."""
    here = (*prefix, node.token)
    found = {here: node.score}
    for child in node.children.values():
        found.update(trie_paths(child, here))
    return found


def owners(tokens: list[list[int]]) -> list[list[int]]:
    """Return, for each prefix of each candidate, the first candidate that has it."""
    return [
        [
            next(v for v, other in enumerate(tokens) if other[: at + 1] == mine[: at + 1])
            for at in range(len(mine))
        ]
        for mine in tokens
    ]


def kept_paths(tokens: list[list[int]], scores: list[list[float]], max_nodes: int) -> set[float]:
    """Return the scores of the nodes that a capacity of `max_nodes` holds, best first."""
    ranked = sorted(trie_paths(build_trie(tokens, scores)).values(), reverse=True)
    return set(ranked[:max_nodes])


def packed_paths(
    tokens: list[int], parents: list[int], valid: list[bool]
) -> dict[tuple[int, ...], int]:
    """Return every node of a packed tree by the tokens from the root to it, with its index."""
    paths: list[tuple[int, ...]] = []
    found: dict[tuple[int, ...], int] = {}
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        path = (token,) if i == 0 else (*paths[parent], token)
        paths.append(path)
        if valid[i]:
            assert path not in found, "a node is twice in the tree"
            found[path] = i
    return found


def walk(
    tokens: list[int], parents: list[int], valid: list[bool], choices: list[int]
) -> tuple[list[int], int]:
    """Return the accepted path, root first, and the bonus token."""
    path = [0]
    while True:
        here = path[-1]
        child = [
            i
            for i in range(1, len(tokens))
            if valid[i] and parents[i] == here and tokens[i] == choices[here]
        ]
        if not child:
            return path, choices[here]
        path.append(child[0])


def beam_search(
    log_probs: Callable[[tuple[int, ...]], list[float]], root: int, W: int, L: int
) -> list[list[tuple[tuple[int, ...], float]]]:
    """Return the W best prefixes of each length up to L and their scores, best first, by level."""
    levels: list[list[tuple[tuple[int, ...], float]]] = [[((root,), 0.0)]]
    for _ in range(L - 1):
        grown = [
            ((*path, token), score + step)
            for path, score in levels[-1]
            for token, step in enumerate(log_probs(path))
        ]
        levels.append(sorted(grown, key=lambda item: -item[1])[:W])
    return levels


def prefixes(tokens: list[list[int]], parents: list[list[int]]) -> list[list[tuple[int, ...]]]:
    """Return the prefixes of a search by length and index: the parent's prefix plus a token."""
    levels = [[(own[0],) for own in tokens]]
    for depth in range(1, len(tokens[0])):
        levels.append(
            [
                (*levels[-1][parent[depth]], own[depth])
                for own, parent in zip(tokens, parents, strict=True)
            ]
        )
    return levels


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))
