"""What drafts for a target: a trained drafter, a lookup, both, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from redrafter_mlx.config import DEFAULT_BEAM_SHAPE, BeamShape
from redrafter_mlx.drafter import Drafter
from redrafter_mlx.drafter_files import load_drafter
from redrafter_mlx.lookup import Both, Lookup, split_lookup
from redrafter_mlx.proposer import Proposer
from redrafter_mlx.target import Target
from redrafter_mlx.traced import traced_proposer

if TYPE_CHECKING:
    from redrafter_mlx.loading import TargetSource


@dataclass(frozen=True)
class DraftSource:
    """What drafts for one target.

    proposer:   None decodes plainly
    drafter:    the trained one in it, if there is one
    kind:       tells apart what takes a different time to draft
    words:      the same for people and records; None if nothing drafts
    beam_shape: what fills up a shape that was asked for in part
    """

    proposer: Proposer | None
    drafter: Drafter | None
    kind: str
    words: str | None
    beam_shape: BeamShape


def find_drafts(
    drafter: Drafter | Proposer | str | Path | None, target: Target, source: TargetSource | None
) -> DraftSource:
    """What `drafter` stands for: itself, the path of its folder, or a word of `split_lookup`.

    Raises MismatchError for a drafter of another target.
    """
    drafter, looks_up = split_lookup(drafter)
    if isinstance(drafter, (str, Path)):
        drafter = load_drafter(
            drafter,
            target,
            target_name=source.name if source else None,
            target_fingerprint=source.fingerprint if source else None,
        )
    if isinstance(drafter, Drafter):
        mx.eval(drafter.parameters())
        bound, shape = drafter.bind(target), drafter.config.beam_shape
        if not looks_up:
            return DraftSource(traced_proposer(bound), drafter, "drafter", "drafter", shape)
        both, kind = Both(bound, Lookup()), "drafter and lookup"
        return DraftSource(traced_proposer(both), drafter, kind, kind, both.beam_shape(shape))
    if looks_up or isinstance(drafter, Lookup):
        lookup = drafter if isinstance(drafter, Lookup) else Lookup()
        return DraftSource(traced_proposer(lookup), None, "lookup", "lookup", lookup.beam_shape)
    words = None if drafter is None else "drafter"
    return DraftSource(drafter, None, type(drafter).__name__, words, DEFAULT_BEAM_SHAPE)
