"""What a caller names as the drafter: the one parser of `--drafter` and of `load`'s argument.

auto             prompt lookup and earlier texts, together with the trained drafter, else the
                 target's own MTP head or a published one, else the successors that are known
none             no drafts: plain decoding
lookup           prompt lookup alone
earlier          copies of the texts of earlier requests alone
successors       what the target says after each token, whatever came before it
trained          the drafter that was trained for the target
mtp              the multi-token-prediction head in the target's own files
mtp:MODEL        that in another copy of the target: a folder, or a Hub repository
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

from redrafter_mlx.drafting.untrained.host_drafters import HOST_DRAFTERS
from redrafter_mlx.errors import BadInputError

AUTO, NONE, TRAINED, MTP, SUCCESSORS = "auto", "none", "trained", "mtp", "successors"

_CLASS = re.compile(r".+\.py:\w+")
_TREE = re.compile(r"\+tree:([^+]*)")


@dataclass(frozen=True)
class DrafterName:
    """A parsed name; whether there are such drafters is not known yet.

    parts:  drafters: TRAINED, MTP, SUCCESSORS, mtp:MODEL, FILE.py:CLASS, or a folder, model or
            repository; two draft together
    host:   drafters on the host, which draft alone or beside these
    auto:   a published drafter replaces a missing trained one
    tree:   name or file of the static tree to draft along; None drafts beams
    """

    parts: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
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
    own, host = _split_host(_TREE.sub("", os.fspath(name), count=1))
    if tree is not None and own in (AUTO, None):
        named = own or "+".join(host)
        raise BadInputError(
            f"{named} drafts along no tree; name a drafter, as in {TRAINED}+tree:NAME"
        )
    if own == AUTO:
        return DrafterName((TRAINED,), tuple(HOST_DRAFTERS), auto=True)
    return DrafterName(() if own is None else _parts(own), host, tree=tree)


def is_class(part: str) -> bool:
    """Whether a part of a name is FILE.py:CLASS."""
    return _CLASS.fullmatch(part) is not None


def model_with_head(part: str) -> str | None:
    """Return the model in mtp:MODEL, with `~` expanded; None for any other part of a name."""
    mtp, colon, model = part.partition(":")
    return os.path.expanduser(model) if colon and mtp == MTP else None


def _split_host(name: str) -> tuple[str | None, tuple[str, ...]]:
    """Split off the drafters on the host: return the other drafter, and those."""
    host: list[str] = []
    own: str | None = name
    while own is not None and (found := _first_host(own)):
        word, own = found
        if word in host:
            raise BadInputError(f"{word} is named twice, so it cannot be combined; name it once")
        host.append(word)
    if own == "":
        beside = f"a drafter beside {'+'.join(host)}" if host else f"a drafter, or {NONE}"
        raise BadInputError(f"drafter is {name!r}; name {beside}")
    return own, tuple(word for word in HOST_DRAFTERS if word in host)


def _first_host(name: str) -> tuple[str, str | None] | None:
    """Return a host drafter at an end of a name, and the rest, which is None if there is none."""
    for word in HOST_DRAFTERS:
        if name == word:
            return word, None
        if name.endswith(f"+{word}"):
            return word, name.removesuffix(f"+{word}")
        if name.startswith(f"{word}+"):
            return word, name.removeprefix(f"{word}+")
    return None


def _parts(name: str) -> tuple[str, ...]:
    """Return the drafters' names in "A" or "A+B"; a name that exists on disk is not split."""
    name = os.path.expanduser(name)
    parts = [name] if os.path.exists(name) else [*map(os.path.expanduser, name.split("+"))]
    if len(parts) > 2 or not all(parts):
        raise BadInputError(f"drafter is {name!r}; name one drafter, or two as A+B")
    if AUTO in parts:
        raise BadInputError(
            f"{AUTO} is {'+'.join((TRAINED, *HOST_DRAFTERS))}, and two drafters at most draft "
            f"together; name {TRAINED} and the other one"
        )
    if NONE in parts:
        raise BadInputError(f"{NONE} decodes plainly, so it cannot be combined; give it alone")
    for word in HOST_DRAFTERS:
        if word in parts:
            raise BadInputError(f"{word} is named between two drafters; name it last")
    return tuple(parts)
