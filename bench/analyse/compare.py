"""Comparison of two results: which figures differ by more than their spread."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from redrafter_mlx.bench.statistics import Spread
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files.regular_file import read_regular_text

FIGURES = ("tps", "request_tps", "total_tps", "speedup", "over_plain", "tokens_per_step")
_IDENTITY = ("dtype", "method", "drafter", "accept", "temperature", "beam_width", "beam_length",
             "max_nodes", "prefixes", "epsilon", "delta", "draft_tokens", "category",
             "batch_size", "prompt_tokens")  # fmt: skip

RESULT = "result.json"
"""Name of the file in a report's folder that holds the result."""

SavedRow = Mapping[str, object]
"""A row of a saved result."""


class Saved(NamedTuple):
    """A saved result."""

    rows: list[SavedRow]
    setup: dict[str, object]  # what it was measured with, such as {"machine chip": "M1"}


@dataclass(frozen=True)
class Change:
    """One figure of one row in both results."""

    row: SavedRow
    figure: str
    before: Spread
    after: Spread
    ratio: Spread  # the second over the first, with its 95% interval

    @property
    def certain(self) -> bool:
        """Whether the interval excludes 1, which means no change."""
        return self.verdict == "differs"

    @property
    def verdict(self) -> str:
        alone = [spread.low == spread.high for spread in (self.before, self.after)]
        if any(alone) and self.ratio.median != 1:  # a side without an interval: unknown scatter
            return "one run each" if all(alone) else "one run"
        return "within the spread" if self.ratio.low <= 1 <= self.ratio.high else "differs"

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "certain": self.certain, "verdict": self.verdict}


def read_result(path: str | Path) -> Saved:
    """Read the object that `bench --json` or `--paper` printed, at the end of a file or a report.

    Rows of a table with several lengths of prompts have that length. Raises BadInputError.
    """
    file = Path(path) / RESULT if Path(path).is_dir() else Path(path)
    try:
        lines = read_regular_text(file).strip().splitlines()
        result = json.loads(lines[-1])
        results = result.get("results", [result])
        rows: list[SavedRow] = []
        for each in results:
            length = {"prompt_tokens": each["protocol"]["prompt_tokens"]} if results[1:] else {}
            rows += [{**row, **length} for row in each["rows"]]
        return Saved(rows, _setup(results[0]) if results else {})
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from None
    except (AttributeError, LookupError, TypeError, ValueError):
        raise BadInputError(
            f"{path} does not end in what `redrafter-mlx bench --json` prints"
        ) from None


def compare(before: Sequence[SavedRow], after: Sequence[SavedRow]) -> list[Change]:
    """Return every figure that both results have, in the first result's order.

    The two runs are independent, so the interval of a ratio follows from both intervals: on a
    logarithmic scale the squares of the half-widths add. Raises BadInputError if the results have
    no row in common.
    """
    second = {_identity(row): row for row in after}
    changes = []
    for row in before:
        other = second.get(_identity(row), {})
        for figure in FIGURES:
            a, b = _spread(row.get(figure)), _spread(other.get(figure))
            if a is not None and b is not None:
                named = {name: row.get(name) for name in _IDENTITY}
                changes.append(Change(named, figure, a, b, _ratio(a, b)))
    if not changes:
        raise BadInputError("the two results have no row in common: no method, shape and dtype")
    return changes


def differing(before: Saved, after: Saved) -> list[str]:
    """Describe in what models, protocol, machine and rows differ, as `machine chip: M1, M2`."""
    first, second = ({_identity(row) for row in saved.rows} for saved in (before, after))
    names = dict.fromkeys([*before.setup, *after.setup])
    pairs = {name: (before.setup.get(name), after.setup.get(name)) for name in names}
    found = [f"{name}: {a}, {b}" for name, (a, b) in pairs.items() if a != b]
    if first != second:
        found.append(f"rows without a counterpart: {len(first - second)}, {len(second - first)}")
    return found


def _setup(result: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a result's machine, protocol and models; the models are numbered."""
    parts = {name: result.get(name) or {} for name in ("machine", "protocol")}
    models = result.get("models")
    for i, model in enumerate(models if isinstance(models, list) else [], 1):
        parts["model" if i == 1 else f"model {i}"] = model
    return {
        f"{name} {field}": value
        for name, part in parts.items()
        for field, value in (part.items() if isinstance(part, dict) else ())
    }


def _identity(row: SavedRow) -> tuple[object, ...]:
    return tuple(str(row.get(name)) for name in _IDENTITY)


def _spread(value: object) -> Spread | None:
    if not isinstance(value, dict):
        return None
    try:
        found = Spread(*(float(value[name]) for name in ("median", "low", "high")))
    except (KeyError, TypeError, ValueError):
        return None
    return found if min(found.median, found.low, found.high) > 0 else None


def _ratio(a: Spread, b: Spread) -> Spread:
    """Return b / a; the half-widths below and above the centre are computed separately."""
    centre = math.log(b.median / a.median)
    down = math.hypot(math.log(b.median / b.low), math.log(a.high / a.median))
    up = math.hypot(math.log(b.high / b.median), math.log(a.median / a.low))
    return Spread(math.exp(centre), math.exp(centre - down), math.exp(centre + up))
