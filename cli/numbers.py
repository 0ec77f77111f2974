"""Whole numbers as people type them: `24GB`, `24 GiB`, `1.5M`, `1e6`, `16_384`, `2,000,000`."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(
    r"([+-]?(?:\d[\d_,]*)?(?:\.\d+)?(?:e[+-]?\d{1,2})?)\s*(?:([kmgt])(i)?)?(b?)", re.I
)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def whole_number(text: str, unit: int = 1) -> int:
    """Parse a whole number, with k for 1000 or Ki for 1024 and so on, and with or without a B.

    Args:
      unit: what a number without a multiple counts, such as 1_000_000 for megabytes; the result
        counts it too
    Raises ValueError, saying what to give.
    """
    found = _NUMBER.fullmatch(text.strip())
    if found is None or not any(map(str.isdigit, found[1])):
        raise ValueError(f"{text!r:.80} is no number; give one such as 2000, 1.5M, 1e6 or 24GB")
    digits, multiple, binary, _ = found.groups()
    number = Decimal(re.sub("[_,]", "", digits))
    if multiple:
        number = number * (1024 if binary else 1000) ** _POWERS[multiple.lower()] / unit
    if number != int(number):
        raise ValueError(f"{text!r:.80} is no whole number")
    return int(number)
