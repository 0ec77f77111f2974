"""What a step costs on this machine: seconds by rows, by context and by beam shape.

Kernels change at certain row counts, so the time of a target's call over N rows is a staircase,
not a line: one row more can cost nothing, or double the call. The curves keep the stairs: every
small row count is measured, nothing is smoothed, and what lies between two measured row counts
costs as much as the upper one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from redrafter_mlx.config import BeamShape, refuse_unknown_keys
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.atomic_write import write_whole
from redrafter_mlx.runtime.paths import cache_dir

_LEAST_JUMP = 0.1
"""A rise below this share of the call is no cliff, however quiet the machine; nor is a fall below
it a reason to read rows that nobody asks for."""

_MOST_PLAIN_ROWS = 4


@dataclass(frozen=True)
class Setup:
    """What was measured, on what; curves are used again only where all of it is the same.

    chip:    the device's name
    model:   fingerprint of the target's tensors: names, shapes and types
    drafter: the same of the drafter, or what drafts in its place
    dtype:   of the target's hidden states
    mlx:     MLX's version
    blas:    what multiplies matrices on a CPU
    """

    chip: str
    model: str
    drafter: str
    dtype: str
    mlx: str
    blas: str

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, str) or not value:
                raise BadInputError(f"{name} is {value!r}; it must be a text")

    @property
    def path(self) -> Path:
        """Where curves for it are kept."""
        key = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return cache_dir() / "costs" / f"{key[:32]}.json"


@dataclass(frozen=True)
class Cliff:
    """One more row than `rows` makes the target's call longer by `jump`, a share of it."""

    rows: int
    jump: float


@dataclass(frozen=True)
class CostCurves:
    """Seconds, as medians of repeated measurements.

    short_context, long_context: committed tokens at which the target was called
    short, long: pairs of rows and seconds of the target's call, from one row on
    draft:       triples of width, length and seconds of drafting and packing
    plain_rest, chain_rest, drafted_rest: the rest of a step without drafts, with one beam (whose
                 rows lie in place already) and with several: choosing, committing, reading the
                 report
    spread:      by how large a share two measurements of the same thing differ, typically
    """

    setup: Setup
    short_context: int
    long_context: int
    short: tuple[tuple[int, float], ...]
    long: tuple[tuple[int, float], ...]
    draft: tuple[tuple[int, int, float], ...]
    plain_rest: float
    chain_rest: float
    drafted_rest: float
    spread: float

    def __post_init__(self) -> None:
        if not 0 <= self.short_context < self.long_context:
            raise BadInputError(
                f"contexts are {self.short_context} and {self.long_context}; give a short and a "
                f"longer one"
            )
        for name, curve in (("short", self.short), ("long", self.long)):
            rows = [r for r, _ in curve]
            if rows[:1] != [1] or rows != sorted(set(rows)):
                raise BadInputError(f"{name} has rows {rows}; they must rise from 1")
            _check_seconds(name, [s for _, s in curve], least=1e-9)
        for width, length, _ in self.draft:
            _ = BeamShape(width, length)
        _check_seconds("draft", [s for *_, s in self.draft])
        for name in ("plain_rest", "chain_rest", "drafted_rest", "spread"):
            _check_seconds(name, [getattr(self, name)])

    @property
    def most_rows(self) -> int:
        return self.short[-1][0]

    def plain_rows(self, context: int) -> int:
        """Rows that plain decoding calls the target with: padding, where that makes it cheaper.

        A library can multiply a matrix by two rows faster than by one; behind a long context each
        row's attention outweighs that, so there is none behind more than was measured. How far
        measurements scatter does not matter here: where both cost about the same, either will do.
        """
        if context > self.long_context:
            return 1
        few = [r for r, _ in self.short if r <= _MOST_PLAIN_ROWS]
        cheapest, rows = min((self.verify(r, context), r) for r in few)
        return rows if 1 - cheapest / self.verify(1, context) > _LEAST_JUMP else 1

    def verify(self, rows: int, context: int) -> float:
        """Seconds of the target's call over `rows` rows behind `context` tokens."""
        like = next((r for r, _ in self.long if r >= rows), self.long[-1][0])
        # More context never makes a call cheaper; where it seems so, that is noise.
        longer = max(_at(self.long, like) - _at(self.short, like), 0.0)
        share = (context - self.short_context) / (self.long_context - self.short_context)
        return _at(self.short, rows) + longer * max(share, 0.0)

    def drafting(self, width: int, length: int) -> float:
        """Seconds of drafting `width` candidates of `length` tokens, packed.

        A width that was not measured costs what the next wider one does; lengths lie on straight
        lines, since each further token is the same work again.
        """
        if length == 1:
            return 0.0
        measured = sorted({w for w, *_ in self.draft})
        if not measured:
            return 0.0  # nothing drafts on the device; copies are made on the host
        w = next((m for m in measured if m >= width), measured[-1])
        line = sorted((n, s) for m, n, s in self.draft if m == w)
        return _on_line(line, length) * max(1.0, width / w)

    def step(self, shape: BeamShape, context: int) -> float:
        """Seconds of a whole step; length 1 is plain decoding."""
        if shape.length == 1:
            return self.verify(self.plain_rows(context), context) + self.plain_rest
        drafting = self.drafting(shape.width, shape.length)
        rest = self.chain_rest if shape.width == 1 else self.drafted_rest
        return self.verify(shape.nodes, context) + drafting + rest

    def cliffs(self) -> list[Cliff]:
        """Where one more row costs more than measurements scatter, at the short context."""
        least = max(_LEAST_JUMP, 2 * self.spread)
        pairs = zip(self.short, self.short[1:], strict=False)
        jumps = [Cliff(r, after / before - 1) for (r, before), (_, after) in pairs]
        return [c for c in jumps if c.jump > least]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, object]) -> CostCurves:
        """Raises BadInputError for a missing or unknown key and for values that are no times."""
        _check_keys(cls, given)
        setup = given["setup"]
        if not isinstance(setup, Mapping):
            raise BadInputError(f"setup is {setup!r}; it must be an object")
        _check_keys(Setup, setup)
        values = dict(given)
        values["setup"] = Setup(**setup)
        values["short"] = _tuples(given["short"], 2)
        values["long"] = _tuples(given["long"], 2)
        values["draft"] = _tuples(given["draft"], 3)
        for name in ("short_context", "long_context"):
            _check_whole(name, given[name])
        return cls(**values)  # type: ignore[arg-type]

    def save(self) -> None:
        """Keep the curves for later; a cache that cannot be written is no error."""
        with contextlib.suppress(OSError):
            write_whole(self.setup.path, json.dumps(self.to_dict()))


def saved_curves(setup: Setup) -> CostCurves | None:
    """What was measured before on this very setup; None if nothing was, or the file is damaged."""
    try:
        given = json.loads(setup.path.read_text(encoding="utf-8"))
        curves = CostCurves.from_dict(given) if isinstance(given, dict) else None
    except (OSError, ValueError):
        return None
    return curves if curves is not None and curves.setup == setup else None


def _at(curve: Sequence[tuple[int, float]], rows: int) -> float:
    """The seconds of the least measured row count that holds `rows`; behind the last, in
    proportion to the rows."""
    for measured, seconds in curve:
        if measured >= rows:
            return seconds
    last, seconds = curve[-1]
    return seconds * rows / last


def _on_line(line: Sequence[tuple[int, float]], x: int) -> float:
    """Straight lines between points and on from the last two; from 0 at length 1 to the first."""
    points = [(1, 0.0), *line]
    upper = next((i for i, (at, _) in enumerate(points) if at >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), 0.0)


def _check_seconds(name: str, values: Sequence[object], least: float = 0.0) -> None:
    for value in values:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not least <= value < math.inf:  # type: ignore[operator]
            raise BadInputError(f"{name} holds {value!r}; it must be a time in seconds")


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInputError(f"{name} is {value!r}; it must be a whole number")


def _check_keys(record: type, given: Mapping[str, object]) -> None:
    names = [f.name for f in fields(record)]
    refuse_unknown_keys(given, names, "cost key")
    for name in names:
        if name not in given:
            raise BadInputError(f"cost key {name!r} is missing")


def _tuples(given: object, size: int) -> tuple[tuple[float, ...], ...]:
    """A list of lists of `size` numbers, whole ones in all places but the last."""
    if not isinstance(given, (list, tuple)):
        raise BadInputError(f"a cost curve is {given!r}; it must be a list")
    for point in given:
        if not isinstance(point, (list, tuple)) or len(point) != size:
            raise BadInputError(f"a cost curve holds {point!r}; it must be a list of {size}")
        for value in point[:-1]:
            _check_whole("a row, width or length", value)
        _check_seconds("a cost curve", point[-1:])
    return tuple(tuple(point) for point in given)
