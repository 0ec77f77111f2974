"""Drafters on the host by the names that `--drafter` knows them by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from redrafter_mlx.drafting.untrained.continuation import HostDrafter
from redrafter_mlx.drafting.untrained.earlier import EarlierTexts
from redrafter_mlx.drafting.untrained.ngram import Lookup

LOOKUP, EARLIER = "lookup", "earlier"

HOST_DRAFTERS: Mapping[str, Callable[[bool], HostDrafter]] = {
    LOOKUP: Lookup.beside,
    EARLIER: lambda _: EarlierTexts(),
}
"""What makes each of them, given whether a drafter drafts on the device, too."""


def host_drafters(names: Sequence[str], *, beside: bool) -> tuple[HostDrafter, ...]:
    """Return the host drafters of these names; `beside` a drafter on the device, or alone."""
    return tuple(HOST_DRAFTERS[name](beside) for name in names)
