"""What drafts for a target: a trained drafter, prompt lookup, both, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from redrafter_mlx.drafting.checkpoint import load_drafter
from redrafter_mlx.drafting.compiled import traced_proposer
from redrafter_mlx.drafting.interface import Proposer
from redrafter_mlx.drafting.prompt_lookup import BESIDE_A_DRAFTER, Lookup, split_lookup
from redrafter_mlx.drafting.recurrent import Drafter
from redrafter_mlx.target.model import Target
from redrafter_mlx.target.source import TargetSource


@dataclass(frozen=True)
class DraftSource:
    """What drafts for one target.

    proposer: drafts on the device; None if nothing does
    drafter:  the trained one in it, if there is one
    lookup:   adds copies of the text; None if it is not looked up
    kind:     tells apart what takes a different time to draft; None for what is like no other
    words:    the same for people and records; None if nothing drafts
    """

    proposer: Proposer | None
    drafter: Drafter | None
    lookup: Lookup | None
    kind: str | None
    words: str | None


def find_drafts(
    drafter: Drafter | Proposer | Lookup | str | Path | None,
    target: Target,
    source: TargetSource | None,
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
    if isinstance(drafter, Lookup):
        return DraftSource(None, None, drafter, "lookup", "lookup")
    if drafter is None:
        words = "lookup" if looks_up else None
        return DraftSource(None, None, Lookup() if looks_up else None, "lookup", words)
    lookup = Lookup(BESIDE_A_DRAFTER) if looks_up else None
    words = "drafter and lookup" if looks_up else "drafter"
    if not isinstance(drafter, Drafter):
        return DraftSource(drafter, None, lookup, None, words)
    mx.eval(drafter.parameters())
    return DraftSource(traced_proposer(drafter.bind(target)), drafter, lookup, "drafter", words)
