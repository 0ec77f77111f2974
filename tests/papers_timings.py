"""The authors' timings on two Macs, as `data/papers_timings.json` holds them with their source."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import NamedTuple

CHIPS = ("m1-max", "m2-ultra")

_FILE = Path(__file__).parent / "data" / "papers_timings.json"


class Timings(NamedTuple):
    """One chip and dtype; seconds, of `tokens` new tokens.

    drafted: target calls, and seconds without the prompt's, by beam width and length
    """

    tokens: int
    plain: float
    drafted: dict[tuple[int, int], tuple[int, float]]


def timings(chip: str, dtype: str) -> Timings:
    data = json.loads(_FILE.read_text(encoding="utf-8"))
    found = data["machines"][chip][dtype]
    prompt = mean(found["prompt_ms"])
    drafted = {(W, L): (calls, (ms - prompt) / 1e3) for W, L, calls, ms in found["drafted"]}
    return Timings(data["tokens"], mean(found["plain_ms"]) / 1e3, drafted)
