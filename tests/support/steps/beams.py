"""Random beams, their paths, and the drafter's log-probabilities along them."""

from __future__ import annotations

import math
import random

import mlx.core as mx
from tiny import HIDDEN, VOCAB

from redrafter_mlx.drafting.recurrent import RecurrentDrafter
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.sampling import log_softmax
from redrafter_mlx.speculation.tree import TokenTree, pack_beam


def random_beams(rng: random.Random, B: int, W: int, L: int, vocab: int) -> tuple[list, list]:
    """Return candidates with consistent cumulative scores: equal prefixes have equal scores."""
    batch_tokens, batch_scores = [], []
    for _ in range(B):
        memo: dict[tuple[int, ...], float] = {}
        root = rng.randrange(vocab)
        tokens, scores = [], []
        for _ in range(W):
            row, score, line = [root], 0.0, [0.0]
            for _ in range(L - 1):
                row.append(rng.randrange(vocab))
                step = memo.setdefault(tuple(row), -rng.choice([0.0, 0.25, rng.random() * 3]))
                score += step
                line.append(score)
            tokens.append(row)
            scores.append(line)
        batch_tokens.append(tokens)
        batch_scores.append(scores)
    return batch_tokens, batch_scores


def pack(tokens: list, scores: list, max_nodes: int) -> TokenTree:
    return pack_beam(Beams(mx.array(tokens), mx.array(scores)), max_nodes)


def ended_early(rng: random.Random, tokens: list, scores: list) -> None:
    """End candidates at random; tokens after an end are valid in other candidates."""
    rows, lines = ([one for batch in nested for one in batch] for nested in (tokens, scores))
    for row, line in zip(rows, lines, strict=True):
        end = rng.randrange(1, len(row) + 1)
        line[end:] = [-math.inf] * (len(row) - end)
        row[end:] = [rng.choice([0, 1]) for _ in row[end:]]


def living_paths(tokens: list, scores: list) -> dict[tuple[int, ...], float]:
    """Return every prefix before its candidate's end, with its best score in any candidate."""
    found: dict[tuple[int, ...], float] = {}
    for row, line in zip(tokens, scores, strict=True):
        for end in range(1, len(row) + 1):
            if line[end - 1] > -math.inf:
                path = tuple(row[:end])
                found[path] = max(found.get(path, -math.inf), line[end - 1])
    return found


def log_probs_along(
    bound: RecurrentDrafter, context: mx.array, path: tuple[int, ...]
) -> list[float]:
    """Return the drafter's log probabilities after a path, computed one token at a time."""
    state = mx.zeros((1, 1, HIDDEN))
    for token in path:
        state = bound.advance(state, mx.array([[token]]))
    row = log_softmax(bound.logits(context[None, None], state))[0, 0].tolist()
    if bound.vocabulary.tokens is None:
        return row
    full = [-1e9] * VOCAB
    for token, value in zip(bound.vocabulary.tokens.tolist(), row, strict=True):
        full[token] = value
    return full
