"""The result as tables of text, which a terminal and Markdown both show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from redrafter_mlx.bench.analyse.compare import Change
from redrafter_mlx.bench.analyse.grid import Grid
from redrafter_mlx.bench.analyse.paper import PublishedTable, rows_beside
from redrafter_mlx.bench.analyse.result import Result
from redrafter_mlx.bench.analyse.summary import WHOLE, Row
from redrafter_mlx.bench.measure.breakdown import Breakdown
from redrafter_mlx.bench.measure.methods import BASELINE
from redrafter_mlx.bench.statistics import Spread

_MOST_DEPTHS = 8
"""Columns of acceptance by depth that a terminal has room for; copies of the text go deeper."""


@dataclass(frozen=True)
class TextTable:
    """A heading, column names and cells; `note` stands below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def tables_of(result: Result) -> list[TextTable]:
    """Everything that a person wants to see, the heatmaps apart."""
    whole = [r for r in result.rows if r.category == WHOLE]
    found = [main_table(whole)]
    if any(r.acceptance or r.nodes_after for r in whole):
        found.append(acceptance_table(whole))
    if any(r.category != WHOLE for r in result.rows):
        found.append(category_table(result.rows))
    if result.breakdowns:
        found.append(breakdown_table(result.breakdowns))
    return [*found, *(paper_table(table, result.rows) for table in result.paper)]


def header_lines(result: Result) -> list[str]:
    """What the figures belong to."""
    m, p = result.machine, result.protocol
    lines = [
        f"{m.chip} ({m.device}), {m.os}, Python {m.python}, redrafter-mlx {m.redrafter_mlx}, "
        f"mlx {m.mlx}, mlx-lm {m.mlx_lm}, BLAS: {m.blas}"
    ]
    for model in result.models:
        weights = f", {model.bits}-bit weights" if model.bits else ""
        drafter = f"drafts from {model.drafter}" if model.drafter else "no drafts"
        if model.named is not None:
            drafter = f"{model.named}: {drafter}"
        lines.append(
            f"{model.dtype}: {model.model}{_short(model.model_hash)} in {model.arithmetic}"
            f"{weights}; {drafter}{_short(model.drafter_hash)}"
        )
    repeats = "once" if p.repeats == 1 else f"{p.repeats} times"
    asked = "1 question" if p.asked == 1 else f"{p.asked} questions"
    lines.append(
        f"{asked} ({p.questions}), {p.max_tokens} tokens, each {repeats}; 95% intervals in brackets"
    )
    return lines


def main_table(rows: Sequence[Row]) -> TextTable:
    """Every method over all questions."""
    columns: dict[str, Callable[[Row], str]] = {"method": label}
    if len({r.dtype for r in rows}) > 1:
        columns["dtype"] = lambda r: r.dtype
    if any(r.temperature > 0 for r in rows):
        columns["accept"] = lambda r: r.accept or ""
        columns["T"] = lambda r: f"{r.temperature:g}"
    padded = any(r.rows != r.nodes for r in rows)
    columns.update(
        {
            "W": lambda r: _whole(r.beam_width),
            "L": lambda r: _whole(r.beam_length),
            "N": lambda r: _count(r.nodes),
            **({"padded to": lambda r: _count(r.rows)} if padded else {}),
            "tok/s": lambda r: spread(r.tps),
            "speedup": lambda r: spread(r.speedup, "x"),
            "tokens/step": lambda r: spread(r.tokens_per_step),
            "first token": lambda r: spread(r.first_token, " ms", 1000, 0),
            "peak GB": lambda r: f"{r.peak_memory:.2f}",
            "same tokens": _equality,
        }
    )
    cells = tuple(tuple(show(r) for show in columns.values()) for r in rows)
    return TextTable(
        f"Tokens a second behind the first token; speedup over {BASELINE}",
        tuple(columns),
        cells,
        "N: nodes verified in a step, the mean of those counted in the trees.",
    )


def acceptance_table(rows: Sequence[Row]) -> TextTable:
    """How far drafts are accepted, and what merging prefixes saves."""
    drafted = [r for r in rows if r.acceptance or r.nodes_after]
    deepest = min(max(len(r.acceptance) for r in drafted), _MOST_DEPTHS)
    columns = ("method", "dtype", "accept", "T", *(f"draft {d + 1}" for d in range(deepest)),
               "nodes before", "after: 1%", "median", "99%", "saved")  # fmt: skip
    cells = []
    for r in drafted:
        shares = [f"{share:.1%}" for share in r.acceptance[:deepest]]
        before, after = r.nodes_before, r.nodes_after
        nodes = [f"{v:g}" for v in (after.p1, after.median, after.p99)] if after else ["", "", ""]
        cells.append(
            (f"{label(r)} {_shape(r)}".strip(), r.dtype, r.accept or "", f"{r.temperature:g}",
             *shares, *[""] * (deepest - len(shares)), f"{before.median:g}" if before else "",
             *nodes, _saved(r))
        )  # fmt: skip
    return TextTable(
        "Share of steps in which each draft was accepted; nodes before and after merging prefixes",
        columns,
        tuple(cells),
        "; ".join(_automatic(r) for r in drafted if r.beam_width is None and r.shapes),
    )


def category_table(rows: Sequence[Row]) -> TextTable:
    """The fastest shape of each drafter by category, beside the baseline."""
    cells = []
    drafted = [r for r in rows if r.method == "redrafter" and r.category == WHOLE and r.tps]
    for kind in dict.fromkeys((r.dtype, r.temperature, r.drafter) for r in drafted):
        here = [r for r in drafted if (r.dtype, r.temperature, r.drafter) == kind]
        dtype, temperature, drafter = kind
        best = max(here, key=lambda r: r.tps.median if r.tps else 0.0)
        for row in rows:
            if _identity(row) != _identity(best):
                continue
            base = next(
                (b for b in rows if b.method == BASELINE and b.category == row.category
                 and (b.dtype, b.temperature) == (dtype, temperature)), None
            )  # fmt: skip
            cells.append(
                (row.category, dtype, f"{temperature:g}",
                 " ".join(filter(None, (drafter, best.accept, _shape(best)))),
                 str(row.questions), spread(base.tps if base else None), spread(row.tps),
                 spread(row.speedup, "x"), spread(row.tokens_per_step))
            )  # fmt: skip
    columns = ("category", "dtype", "T", "fastest", "questions", f"{BASELINE} tok/s", "tok/s",
               "speedup", "tokens/step")  # fmt: skip
    return TextTable("By category, the fastest way of drafting", columns, tuple(cells))


def breakdown_table(breakdowns: Sequence[Breakdown]) -> TextTable:
    """Milliseconds of a step, part by part; a row for each shape."""
    cells = []
    for b in breakdowns:
        parts = [f"{part.device.median * 1000:.2f}" for part in b.parts]
        named = f"{b.drafter}, " if b.drafter else ""
        shape = f"{named}{b.beam_width} x {b.beam_length}, {b.rows} rows"
        whole = (spread(b.device, "", 1000), spread(b.host, "", 1000), spread(b.loop, "", 1000))
        cells.append((b.dtype, shape, *parts, *whole, f"{b.beside_the_call:.1%}"))
    names = [part.name for part in breakdowns[0].parts]
    return TextTable(
        "What a greedy step is made of, in ms",
        ("dtype", "W x L", *names, "sum", "host", "in the loop", "beside the call"),
        tuple(cells),
        "What evaluating a step takes more with a part than without it; brackets hold the least "
        "and the most. Host is the building of the graph, which the loop does while the device "
        "works, so that the step in the loop can be shorter than both together. Beside the call: "
        "the loop's time that is not verification.",
    )


def paper_table(table: PublishedTable, rows: Sequence[Row]) -> TextTable:
    """Published figures, and ours below."""
    cells = [
        ("paper", p.machine, p.model, p.questions, p.method, _whole(p.beam_width),
         "" if p.tps is None else f"{p.tps:.2f}", f"{p.speedup:.2f}x", f"{p.tokens_per_step:.2f}")
        for p in table.entries
    ]  # fmt: skip
    cells += [
        ("here", "", r.dtype, WHOLE, f"{label(r)} {_shape(r)}".strip(), _whole(r.beam_width),
         spread(r.tps), spread(r.speedup, "x"), spread(r.tokens_per_step))
        for r in rows_beside(table, rows)
    ]  # fmt: skip
    columns = ("", "machine", "model", "questions", "method", "W", "tok/s", "speedup",
               "tokens/step")  # fmt: skip
    note = f"{table.source}. Beside it: {table.beside}."
    return TextTable(f"{table.name}: {table.title}", columns, tuple(cells), note)


def compare_table(changes: Sequence[Change], before: str, after: str) -> TextTable:
    """Two results, figure by figure."""
    cells = tuple(
        (describe_row(c.row), c.figure, spread(c.before), spread(c.after), spread(c.ratio, "x"),
         c.verdict)
        for c in changes
    )  # fmt: skip
    columns = ("row", "figure", before, after, "ratio", "verdict")
    return TextTable(
        f"{after} by {before}",
        columns,
        cells,
        "Brackets hold 95% intervals. One comparison in twenty differs by chance alone.",
    )


def heat_table(grid: Grid) -> TextTable:
    """A heatmap without colours: tokens a second, and the speedup."""
    rows = []
    for width in grid.widths:
        cells = [heat_cell(grid, width, length) for length in grid.lengths]
        rows.append((f"W {width}", *cells))
    return TextTable(
        f"Tokens a second by beam shape ({grid.title})",
        ("", *(f"L {length}" for length in grid.lengths)),
        tuple(rows),
        f"{BEST} the fastest shape",
    )


BEST = "★"


def heat_cell(grid: Grid, width: int, length: int, between: str = " ") -> str:
    """`★ 31.42 1.25x`, or nothing where that shape was not measured."""
    cell = grid.at(width, length)
    if cell is None:
        return ""
    mark = f"{BEST} " if cell == grid.best else ""
    return f"{mark}{cell.tps:.2f}{between}{cell.speedup:.2f}x"


def spread(value: Spread | None, unit: str = "", scale: float = 1.0, digits: int = 2) -> str:
    """`31.42 [30.90, 31.80]`; nothing where there is none."""
    if value is None:
        return ""
    median, low, high = (f"{v * scale:.{digits}f}" for v in (value.median, value.low, value.high))
    return f"{median}{unit}" if low == median == high else f"{median}{unit} [{low}, {high}]"


def label(row: Row) -> str:
    """The method by its name, with what tells it from its like."""
    if row.draft_tokens is not None:
        return f"{row.method} ({row.draft_tokens} drafts)"
    name = row.method if row.drafter is None else f"{row.method}, {row.drafter}"
    if row.prefixes == "final":
        name += " (final candidates alone)"
    automatic = row.method == "redrafter" and row.beam_width is None
    return f"{name} (automatic)" if automatic else name


def describe_row(row: Mapping[str, object]) -> str:
    """A row of a saved result in words."""
    named = [str(row["drafter"])] if row.get("drafter") else []
    parts = [str(row["method"]), *named, str(row["dtype"])]
    if row["beam_width"] is not None:
        parts.append(f"{row['beam_width']} x {row['beam_length']}")
    if row["temperature"]:
        parts.append(f"{row['accept'] or ''} T {row['temperature']}".strip())
    return ", ".join([*parts, str(row["category"])])


def _identity(row: Row) -> tuple[object, ...]:
    return (row.dtype, row.method, row.drafter, row.accept, row.temperature, row.beam_width,
            row.beam_length)  # fmt: skip


def _shape(row: Row) -> str:
    return "" if row.beam_width is None else f"{row.beam_width} x {row.beam_length}"


def _whole(value: int | None) -> str:
    return "" if value is None else str(value)


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _saved(row: Row) -> str:
    """What share of the beams' tokens merging saved, in the mean (the paper's figure 6)."""
    if row.nodes is None or row.nodes_before is None or row.beam_width is None:
        return ""
    return f"{1 - row.nodes / row.nodes_before.median:.0%}"


def _automatic(row: Row) -> str:
    """Which shapes were chosen, those of at least one step in a hundred."""
    chosen = ", ".join(f"{W} x {L} {share:.0%}" for W, L, share in row.shapes if share >= 0.01)
    which = ", ".join(filter(None, (row.dtype, row.drafter, row.accept)))
    return f"automatic shapes ({which}, T {row.temperature:g}): {chosen}"


def _equality(row: Row) -> str:
    if row.matches_baseline is None:
        return ""
    if row.matches_baseline:
        return "yes"
    return f"NO, {row.agreeing:.2%}" if row.agreeing is not None else "NO"


def _short(fingerprint: str | None) -> str:
    return "" if fingerprint is None else f" {fingerprint[: len('sha256:') + 12]}"
