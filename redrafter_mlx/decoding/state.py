"""The state that passes from step to step, and what a drafter sees of each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.config import PLAIN, SamplingParams
from redrafter_mlx.decoding.proposal import Drafted
from redrafter_mlx.decoding.sequence_cache import SequenceCache
from redrafter_mlx.drafting.interface import Features, Seen
from redrafter_mlx.speculation.accept import Acceptance
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.penalties import Past
from redrafter_mlx.speculation.tree import TokenTree, pack_beam


class Drafts(NamedTuple):
    """The trees of a batch and, for rejection, the distributions they were drawn from.

    rows:      one per batch row
    log_probs: [B, N, V], the distribution of each node's children, undefined in rows that were not
               drawn; None if no row was
    beams:     what the trees were packed from, so that continuations can join; None if nothing was
               drafted
    from_host: [B, N] bool, the nodes that only a continuation from the host proposes, undefined at
               padding; None if the trees hold none
    noise:     [B, L, V], what `sample` will draw with, if it was drawn for the drafter; else None
    """

    tree: TokenTree
    rows: tuple[Drafted, ...]
    log_probs: mx.array | None = None
    beams: Beams | None = None
    from_host: mx.array | None = None
    noise: mx.array | None = None

    @property
    def plain(self) -> bool:
        """Whether no row has a draft: the trees are roots alone."""
        return all(row == Drafted(PLAIN) for row in self.rows)

    @property
    def usual_size(self) -> bool:
        """Whether many steps have trees of this size, which continuations and batches have not."""
        return self.from_host is None and len(self.rows) == 1


@dataclass(frozen=True)
class RowOptions:
    """How the tokens of one batch row are chosen.

    logprobs: whether its results hold the log-probabilities that each token was chosen from
    """

    sampling: SamplingParams
    logprobs: bool = False


@dataclass
class DecodeState:
    """All state that a batch of sequences carries from step to step.

    Shapes:
      length:  [B] int32, number of committed positions
      drafts:  the trees to verify next; their roots are the last tokens emitted
      keys:    [B, 2] uint32, see sampling
      history: of each row, the tokens before the root that penalties use; None without penalties
    """

    cache: SequenceCache
    length: mx.array
    drafts: Drafts
    keys: mx.array
    options: tuple[RowOptions, ...]
    history: tuple[Past | None, ...]


def newest_positions(
    state: DecodeState, hidden: mx.array, accepted: Acceptance, bound: int, features: Features
) -> Seen:
    """Return the accepted path of a verified tree, or only its last position if that is enough.

    Shapes:
      hidden: [B, N, C], of the tree

    bound: upper bound of state.length
    """
    tree, emitted = state.drafts.tree, accepted.emitted
    most = bound + tree.max_depth + 1
    if not features.every_position:
        last = accepted.last[:, None]
        tokens = [mx.take_along_axis(tree.tokens, last, axis=1), accepted.bonus[:, None]]
        read = mx.take_along_axis(hidden, last[:, :, None], axis=1) if features.any else None
        position = state.length + accepted.n_accepted
        one = mx.ones(position.shape, mx.int32)
        return Seen(mx.concatenate(tokens, axis=1), read, position, one, most)
    path, count = accepted.path, accepted.n_accepted + 1
    read = mx.take_along_axis(hidden, path[:, :, None], axis=1) if features.any else None
    tokens = [tree.tokens[:, :1], emitted]
    return Seen(mx.concatenate(tokens, axis=1), read, state.length, count, most)


def root_alone(root: mx.array) -> TokenTree:
    """Return a tree that holds only its root [B]."""
    tokens = root[:, None, None]
    return pack_beam(Beams(tokens, mx.zeros(tokens.shape)), 1)
