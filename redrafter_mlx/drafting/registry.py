"""From what a caller names to what drafts: a drafter, prompt lookup, both, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.drafting.forms import DrafterFolder
from redrafter_mlx.drafting.interface import Bindable, Drafter
from redrafter_mlx.drafting.prompt_lookup import BESIDE_A_DRAFTER, Lookup, split_lookup
from redrafter_mlx.target.model import Target
from redrafter_mlx.target.source import TargetSource


@dataclass(frozen=True)
class Drafting:
    """What drafts for one target.

    drafter: drafts on the device; None if nothing does
    lookup:  adds copies of the text; None if it is not looked up
    """

    drafter: Drafter | None
    lookup: Lookup | None

    @property
    def words(self) -> str | None:
        """The same for people and records; None if nothing drafts."""
        names = []
        if self.drafter is not None:
            tree = self.drafter.tree
            names = [self.drafter.name if tree is None else f"{self.drafter.name} along {tree}"]
        if self.lookup is not None:
            names.append("lookup")
        return " and ".join(names) or None


def find_drafting(
    drafter: Bindable | Lookup | str | Path | None,
    target: Target,
    tokenizer: TokenizerWrapper,
    source: TargetSource | None,
    *,
    looks_up: bool = False,
) -> Drafting:
    """What `drafter` stands for: itself, the path of its folder, or a word of `split_lookup`.

    looks_up: add prompt lookup to it

    Raises MismatchError for a drafter of another target.
    """
    named, asked = split_lookup(drafter)
    looks_up = looks_up or asked
    if isinstance(named, (str, Path)):
        name, fingerprint = (source.name, source.fingerprint) if source else (None, None)
        named = DrafterFolder(Path(named), name, fingerprint)
    if isinstance(named, Lookup):
        return Drafting(None, named)
    if named is None:
        return Drafting(None, Lookup() if looks_up else None)
    bound = named.bind(target, tokenizer)
    if bound.module is not None:
        mx.eval(bound.module.parameters())
    return Drafting(bound, Lookup(BESIDE_A_DRAFTER) if looks_up else None)
