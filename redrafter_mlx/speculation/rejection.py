"""Rejection sampling on a tree: drafts are drawn, tested and, if rejected, corrected for.

With one beam, this is the algorithm of Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv
2302.01318). A draft x, drawn from q, is accepted with probability min(1, p(x) / q(x)). If it is
rejected, the next token is drawn from the residual, max(p - q, 0) normalised. If a node has several
children, drawn without replacement, the next child is tested against that residual, and q is
normalised without the rejected children (recursive rejection sampling, Jeon et al., arXiv
2402.14160).

Candidates are drawn by stochastic beam search (Kool et al., arXiv 1903.06059): the sequences with
the largest scores after adding Gumbel noise are a sample without replacement. In score order, the
children of each node are such a sample too, including those that the search did not extend. Their
ranks depend on the noise alone, never on the tokens. So dropping the lowest scores, at each length
and at the tree's capacity, keeps the distribution.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.speculation.accept import Acceptance, up_to
from redrafter_mlx.speculation.beam_search import Kept, Levels, check_width, search, top_k
from redrafter_mlx.speculation.constants import iota
from redrafter_mlx.speculation.sampling import (
    CHOICE,
    DRAFT,
    TRIAL,
    gumbel_at,
    sampled_log_probs,
    uniform_at,
)
from redrafter_mlx.speculation.tree import TokenTree, pack_with_sources


class SampledDrafts(NamedTuple):
    """A tree of drawn drafts and the distributions that they were drawn from.

    Shapes:
      tree:      siblings are in the order in which they were drawn
      log_probs: [B, N, V] float32, the distribution that the children of each node come from
    """

    tree: TokenTree
    log_probs: mx.array


def draw_drafts(
    levels: Levels,
    root: mx.array,
    position: mx.array,
    keys: mx.array,
    shape: BeamShape,
    params: SamplingParams,
) -> SampledDrafts:
    """Draw W prefixes of each length without replacement from the drafter, as a tree.

    The drafter's distribution gets the same temperature and filters as the target's.

    Shapes:
      root:     [B] int32
      position: [B] int32, of the root; it never repeats within one answer
      keys:     [B, 2] uint32
    """
    check_width(levels.vocabulary.size, shape.width)
    B, W = root.shape[0], shape.width
    likelihoods = [mx.zeros((B, 1))]  # of the extended prefixes, level by level
    distributions = []

    def draw(level: int, logits: mx.array, above: mx.array) -> Kept:
        """Keep the W largest of the perturbed log-probabilities, which are the scores here."""
        q = sampled_log_probs(logits, params)  # [B, X, V']
        _, live, V = q.shape
        distributions.append(mx.broadcast_to(q, (B, W, V)))
        child = likelihoods[-1][:, :, None] + q
        noise = gumbel_at(keys, position[:, None], live * V, DRAFT + level)
        perturbed = _with_maximum(child + noise.reshape(q.shape), above[:, :, None])
        best, index = top_k(perturbed.reshape(B, -1), W)
        likelihoods.append(mx.take_along_axis(child.reshape(B, -1), index, axis=1))
        return Kept(index // V, index % V, best)

    drawn = search(levels, root, shape, draw)
    tree, sources = pack_with_sources(drawn, shape.nodes)
    log_probs = levels.vocabulary.over_vocabulary(_at_nodes(distributions, sources))
    return SampledDrafts(tree, log_probs)


def accept_rejection(
    drafts: SampledDrafts,
    log_probs: mx.array,
    position: mx.array,
    keys: mx.array,
    width: int,
) -> Acceptance:
    """Test the drafts of each node in turn, and continue from the first that is accepted.

    Shapes:
      log_probs: [B, N, V], the target's distribution after each node
      position:  [B] int32, of the token after the root in the text
      keys:      [B, 2] uint32
    """
    tree = drafts.tree
    B, _, V = log_probs.shape
    children = _children(tree, width)  # [B, N, W], padded with -1
    node = mx.zeros((B,), mx.int32)
    active = mx.ones((B,), mx.bool_)
    residual = mx.exp(_at_node(log_probs, node))
    for depth in range(tree.max_depth):
        uniform = uniform_at(keys, (position + depth)[:, None], width, TRIAL)[:, 0]  # [B, W]
        p, log_q = residual, _at_node(drafts.log_probs, node)
        candidates = _at_node(children, node)  # [B, W]
        chosen = mx.full((B,), -1, mx.int32)
        for i in range(width):
            child = candidates[:, i]
            token = mx.take_along_axis(tree.tokens, mx.maximum(child, 0)[:, None], axis=1)
            p_token = mx.take_along_axis(p, token, axis=1)[:, 0]
            q_token = mx.exp(mx.take_along_axis(log_q, token, axis=1))[:, 0]
            tested = active & (child >= 0) & (chosen < 0)
            accepted = tested & (uniform[:, i] * q_token < p_token)
            chosen = mx.where(accepted, child, chosen)
            refused = (tested & mx.logical_not(accepted))[:, None]
            p = mx.where(refused, _normalised(mx.maximum(p - mx.exp(log_q), 0), p), p)
            log_q = mx.where(refused, _without(log_q, iota(V)[None] == token), log_q)
        active = chosen >= 0
        node = mx.where(active, chosen, node)
        # A batch row that has stopped keeps the residual of its last node.
        residual = mx.where(active[:, None], mx.exp(_at_node(log_probs, node)), p)
    last = (position + _at_node(tree.depths, node))[:, None]
    noise = gumbel_at(keys, last, V, CHOICE)[:, 0]
    bonus = mx.argmax(mx.log(residual) + noise, axis=1).astype(mx.int32)
    return up_to(tree, node, bonus)


def _with_maximum(perturbed: mx.array, maximum: mx.array) -> mx.array:
    """Shift Gumbel-perturbed scores [B, W, V]: each beam's largest becomes `maximum` [B, W, 1].

    -log(exp(-T) - exp(-Z) + exp(-G)) with T the given maximum, Z the beam's own maximum and G a
    score, computed as in Kool et al., appendix B.3.
    """
    own = mx.max(perturbed, axis=-1, keepdims=True)
    v = maximum - perturbed + mx.log1p(-mx.exp(mx.minimum(perturbed - own, 0)))
    shifted = maximum - mx.maximum(v, 0) - mx.log1p(mx.exp(-mx.abs(v)))
    # For the largest score, log1p(-1) is -inf; scores of -inf stay as they are.
    shifted = mx.where(perturbed == own, maximum, shifted)
    return mx.where((perturbed == -mx.inf) | mx.isnan(shifted), -mx.inf, shifted)


def _at_nodes(levels: list[mx.array], sources: mx.array) -> mx.array:
    """Return the draft distribution [B, N, V'] after each node; undefined at the deepest nodes.

    Shapes:
      levels:  L - 1 arrays [B, W, V'], after the prefixes of each length
      sources: [B, N], the prefix that each node came from, as depth * W + index
    """
    stacked = mx.concatenate(levels, axis=1)  # [B, (L - 1) * W, V']
    index = mx.minimum(sources, stacked.shape[1] - 1)
    return mx.take_along_axis(stacked, index[:, :, None], axis=1)


def _children(tree: TokenTree, width: int) -> mx.array:
    """Return the children [B, N, W] of each node in tree order, padded with -1."""
    N = tree.tokens.shape[1]
    node = iota(N)
    mine = tree.parents[:, None, :] == node[None, :, None]  # [B, N, N]
    order = mx.where(mine, node[None, None], N)
    first = mx.sort(order, axis=2)[:, :, : min(width, N)]
    first = mx.pad(first, [(0, 0), (0, 0), (0, width - first.shape[2])], constant_values=N)
    return mx.where(first < N, first, -1)


def _at_node(x: mx.array, node: mx.array) -> mx.array:
    """Gather x [B, N, ...] at node [B]."""
    index = node.reshape(-1, *[1] * (x.ndim - 1))
    return mx.take_along_axis(x, index, axis=1)[:, 0]


def _without(log_probs: mx.array, excluded: mx.array) -> mx.array:
    """Normalise log-probabilities [B, V] without those `excluded`.

    Of a confident drafter, or at a low temperature, all others may be too small for a float32;
    their logarithms are not.
    """
    left = mx.where(excluded, -mx.inf, log_probs)
    total = mx.logsumexp(left, axis=-1, keepdims=True)
    return mx.where(total > -mx.inf, left - total, left)


def _normalised(weights: mx.array, otherwise: mx.array) -> mx.array:
    """Normalise weights [B, V]; `otherwise` where all are 0, which only rounding causes."""
    total = mx.sum(weights, axis=-1, keepdims=True)
    return mx.where(total > 0, weights / mx.maximum(total, 1e-30), otherwise)
