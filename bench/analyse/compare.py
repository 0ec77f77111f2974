"""Two results side by side: which figures differ by more than their spread."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from redrafter_mlx.bench.statistics import Spread
from redrafter_mlx.errors import BadInputError

FIGURES = ("tps", "speedup", "tokens_per_step")
_IDENTITY = ("dtype", "method", "drafter", "accept", "temperature", "beam_width", "beam_length",
             "max_nodes", "draft_tokens", "category")  # fmt: skip

Result = Mapping[str, object]


@dataclass(frozen=True)
class Change:
    """One figure of one row in both results.

    ratio: the second by the first, with its 95% interval
    """

    row: Mapping[str, object]
    figure: str
    before: Spread
    after: Spread
    ratio: Spread

    @property
    def measured_once(self) -> bool:
        """Whether neither figure has an interval, so that nothing says how far both scatter."""
        return self.ratio.low == self.ratio.high != 1

    @property
    def certain(self) -> bool:
        """Whether the interval leaves out 1, that is, no change."""
        return not self.measured_once and not self.ratio.low <= 1 <= self.ratio.high

    @property
    def verdict(self) -> str:
        if self.measured_once:
            return "one run each"
        return "differs" if self.certain else "within the spread"


def read_result(path: str | Path) -> Result:
    """The object that `bench -o json` printed: the last line of a file.

    Raises BadInputError if there is none.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").strip().splitlines()
        result = json.loads(lines[-1])
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, ValueError, IndexError):
        result = None
    if not isinstance(result, dict) or not isinstance(result.get("rows"), list):
        raise BadInputError(f"{path} does not end in what `redrafter-mlx bench -o json` prints")
    return result


def compare(before: Result, after: Result) -> list[Change]:
    """Every figure that both results have, in the first one's order.

    The two runs are independent, so the interval of a ratio follows from both intervals: on a
    logarithmic scale half-widths add as squares. Raises BadInputError if nothing can be compared.
    """
    second = {_identity(row): row for row in _rows(after)}
    changes = []
    for row in _rows(before):
        other = second.get(_identity(row))
        for figure in FIGURES if other is not None else ():
            assert other is not None
            a, b = _spread(row.get(figure)), _spread(other.get(figure))
            if a is not None and b is not None:
                named = {name: row.get(name) for name in _IDENTITY}
                changes.append(Change(named, figure, a, b, _ratio(a, b)))
    if not changes:
        raise BadInputError("the two results have no row in common: no method, shape and dtype")
    return changes


def _rows(result: Result) -> list[Mapping[str, object]]:
    rows = result["rows"]
    assert isinstance(rows, list)
    return [row for row in rows if isinstance(row, dict)]


def _identity(row: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(row.get(name) for name in _IDENTITY)


def _spread(value: object) -> Spread | None:
    if not isinstance(value, dict):
        return None
    try:
        found = Spread(*(float(value[name]) for name in ("median", "low", "high")))
    except (KeyError, TypeError, ValueError):
        return None
    return found if min(found.median, found.low, found.high) > 0 else None


def _ratio(a: Spread, b: Spread) -> Spread:
    """b / a; below and above the centre the half-widths are each side's own."""
    centre = math.log(b.median / a.median)
    down = math.hypot(math.log(b.median / b.low), math.log(a.high / a.median))
    up = math.hypot(math.log(b.high / b.median), math.log(a.median / a.low))
    return Spread(math.exp(centre), math.exp(centre - down), math.exp(centre + up))
