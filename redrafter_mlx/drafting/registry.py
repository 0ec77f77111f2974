"""Resolves what a caller names: a drafter, prompt lookup, both, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.drafting.checked import bound
from redrafter_mlx.drafting.forms import DrafterFolder
from redrafter_mlx.drafting.interface import Bindable, Drafter
from redrafter_mlx.drafting.ngram import BESIDE_A_DRAFTER, Lookup, split_lookup
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.source import TargetSource


@dataclass(frozen=True)
class Drafting:
    """The drafter and the prompt lookup of one target.

    drafter: drafts on the device; None without one
    lookup:  adds copies of the text; None without prompt lookup
    """

    drafter: Drafter | None
    lookup: Lookup | None

    @property
    def words(self) -> str | None:
        """Description for display and records; None if nothing drafts."""
        names = []
        if self.drafter is not None:
            tree = self.drafter.tree
            names = [self.drafter.name if tree is None else f"{self.drafter.name} along {tree}"]
        if self.lookup is not None:
            names.append("lookup")
        return " and ".join(names) or None


def check_drafter(drafter: Bindable) -> Bindable:
    """Return the drafter; raises BadInputError for what is none, such as a class."""
    if isinstance(drafter, type) or not callable(getattr(drafter, "bind", None)):
        raise BadInputError(
            f"drafter is {drafter!r:.80}, which is none; give a name, a folder, or an object that "
            f"derives from Drafter"
        )
    return drafter


def find_drafting(
    drafter: Bindable | str | Path | None,
    target: Target,
    tokenizer: TokenizerWrapper,
    source: TargetSource | None,
    *,
    looks_up: bool = False,
) -> Drafting:
    """Resolve `drafter`: an object, the path of a folder, or a word of `split_lookup`.

    looks_up: add prompt lookup

    Raises MismatchError for a drafter of another target.
    """
    named, asked = split_lookup(drafter)
    looks_up = looks_up or asked
    if isinstance(named, (str, Path)):
        folder = Path(named)
        named = DrafterFolder(folder) if source is None else DrafterFolder.of(folder, source)
    if named is None:
        return Drafting(None, Lookup() if looks_up else None)
    found = bound(check_drafter(named), target, tokenizer)
    mx.eval([module.state for module in found.modules])
    return Drafting(found, Lookup(BESIDE_A_DRAFTER) if looks_up else None)
