"""What a caller names as the drafter: the one parser of `--drafter` and of `load`'s argument.

auto             prompt lookup, together with the trained drafter or else a published one
none             no drafts: plain decoding
lookup           prompt lookup alone
trained          the drafter that was trained for the target
FOLDER           a drafter, or a language model
MODEL            the same by a model's name or a Hub repository
FILE.py:CLASS    a drafter of the user's own
A+B              two of these drafters, or one and lookup
A+tree:NAME      A along a static tree
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from redrafter_mlx.errors import BadInputError

AUTO, NONE, LOOKUP, TRAINED = "auto", "none", "lookup", "trained"

_CLASS = re.compile(r".+\.py:\w+")
_TREE = re.compile(r"\+tree:([^+]*)")


@dataclass(frozen=True)
class DrafterName:
    """A parsed name; whether there are such drafters is not known yet.

    parts:  drafters: TRAINED, FILE.py:CLASS, or a folder, model or repository; two draft together
    lookup: whether prompt lookup is added
    auto:   a published drafter replaces a missing trained one, and lookup alone both
    tree:   name or file of the static tree to draft along; None drafts beams
    """

    parts: tuple[str, ...] = ()
    lookup: bool = False
    auto: bool = False
    tree: str | None = None


def parse(name: str | Path | None) -> DrafterName:
    """Parse a drafter's name; None is plain decoding, and `~` in a path is expanded.

    Raises BadInputError for a name that no drafter can have.
    """
    if name is None or name == NONE:
        return DrafterName()
    found = _TREE.search(os.fspath(name))
    tree = None if found is None else found[1]
    own, lookup = _split_lookup(_TREE.sub("", os.fspath(name), count=1))
    if tree is not None and own in (AUTO, None):
        raise BadInputError(
            f"{own or LOOKUP} drafts along no tree; name a drafter, as in {TRAINED}+tree:NAME"
        )
    if own == AUTO:
        return DrafterName((TRAINED,), lookup=True, auto=True)
    return DrafterName(() if own is None else _parts(own), lookup, tree=tree)


def is_class(part: str) -> bool:
    """Whether a part of a name is FILE.py:CLASS."""
    return _CLASS.fullmatch(part) is not None


def _split_lookup(name: str) -> tuple[str | None, bool]:
    """Split off prompt lookup: return the other drafter and whether there is prompt lookup."""
    if name == LOOKUP:
        return None, True
    own = name.removesuffix(f"+{LOOKUP}")
    if own == name:
        own = name.removeprefix(f"{LOOKUP}+")
    if not own:
        beside = f"a drafter beside {LOOKUP}" if name else f"a drafter, or {NONE}"
        raise BadInputError(f"drafter is {name!r}; name {beside}")
    return own, own != name


def _parts(name: str) -> tuple[str, ...]:
    """Return the drafters' names in "A" or "A+B"; a name that exists on disk is not split."""
    name = os.path.expanduser(name)
    parts = [name] if os.path.exists(name) else [*map(os.path.expanduser, name.split("+"))]
    if len(parts) > 2 or not all(parts):
        raise BadInputError(f"drafter is {name!r}; name one drafter, or two as A+B")
    if AUTO in parts:
        raise BadInputError(
            f"{AUTO} is {TRAINED}+{LOOKUP}, and two drafters at most draft together; "
            f"name {TRAINED} and the other one"
        )
    for word, why in ((NONE, "decodes plainly"), (LOOKUP, "is named twice")):
        if word in parts:
            raise BadInputError(f"{word} {why}, so it cannot be combined with that; give it alone")
    return tuple(parts)
