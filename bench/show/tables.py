"""The result as tables of text, before they are drawn or printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from redrafter_mlx.bench.analyse.batch_summary import BatchResult, BatchRow
from redrafter_mlx.bench.analyse.compare import Change
from redrafter_mlx.bench.analyse.energy import Energy
from redrafter_mlx.bench.analyse.result import Result
from redrafter_mlx.bench.analyse.summary import WHOLE, Row
from redrafter_mlx.bench.measure.methods import BASELINE, Method
from redrafter_mlx.bench.statistics import Spread

_EVERY_DEPTH, _SPARSE = 8, 8
"""The acceptance table has a column for each depth up to the first, then one in `_SPARSE`."""

_PACKED = {"final": "final candidates alone", "separate": "candidates separately"}


@dataclass(frozen=True)
class TextTable:
    """A heading, column names and cells, with a note below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def tables_of(result: Result) -> list[TextTable]:
    """Return all tables of a result, which are everything but the heatmaps."""
    whole = [r for r in result.rows if r.category == WHOLE]
    found = [main_table(whole)]
    if any(r.acceptance or r.nodes_after for r in whole):
        found.append(acceptance_table(whole))
    if any(r.category != WHOLE for r in result.rows):
        found.append(category_table(result.rows))
    if result.energy:
        found.append(energy_table(result.energy))
    return found


def energy_table(measured: Sequence[Energy]) -> TextTable:
    """Return a table of joules per token and mean power by method."""
    return TextTable(
        "Energy of the chip while tokens after the first one were made",
        ("method", "dtype", "T", "joules/token", "watts", "answers"),
        tuple(
            (f"{label(one)} {shape_words(one.method)}".strip(), one.dtype,
             f"{one.method.temperature:g}",
             f"{one.joules_per_token:.3g}", f"{one.watts:.3g}", str(one.answers))
            for one in measured
        ),
    )  # fmt: skip


def header_lines(result: Result | BatchResult) -> list[str]:
    """Return lines that describe the machine, the versions, the models and the questions."""
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
    """Return a table of the methods over all questions."""
    columns: dict[str, Callable[[Row], str]] = {"method": label}
    if len({r.dtype for r in rows}) > 1:
        columns["dtype"] = lambda r: r.dtype
    if any(r.method.temperature > 0 for r in rows):
        columns["accept"] = lambda r: r.method.accept or ""
        columns["T"] = lambda r: f"{r.method.temperature:g}"
    padded = any(r.query_rows != r.nodes for r in rows)
    columns |= {
        "W": lambda r: beam_side(r.method, r.method.beam_width),
        "L": lambda r: beam_side(r.method, r.method.beam_length),
        "N": lambda r: _number(r.nodes),
        **({"padded to": lambda r: _number(r.query_rows)} if padded else {}),
        "tok/s": lambda r: spread(r.tps),
        "speedup": lambda r: spread(r.speedup, "x"),
        "tokens/step": lambda r: spread(r.tokens_per_step),
        "first token": lambda r: spread(r.first_token, " ms", 1000, 0),
        "peak GB": lambda r: f"{r.peak_memory:.2f}",
        "same tokens": _equality,
    }
    cells = tuple(tuple(show(r) for show in columns.values()) for r in rows)
    return TextTable(
        f"Tokens a second after the first token; speedup over {BASELINE}",
        tuple(columns),
        cells,
        "N: nodes verified in a step, the mean of those counted in the trees. peak GB counts the "
        "weights of all that is loaded, other drafters too.",
    )


def acceptance_table(rows: Sequence[Row]) -> TextTable:
    """Return a table of acceptance by draft position, and of the nodes that merging saves."""
    drafted = [r for r in rows if r.acceptance or r.nodes_after]
    deepest = max(len(r.acceptance) for r in drafted)
    depths = [d for d in range(1, deepest + 1)
              if d <= _EVERY_DEPTH or d % _SPARSE == 0 or d == deepest]  # fmt: skip
    columns = ("method", "dtype", "accept", "T", *(f"draft {d}" for d in depths),
               "nodes before", "after: 1%", "median", "99%", "saved")  # fmt: skip
    cells = []
    for r in drafted:
        shares = [f"{r.acceptance[d - 1]:.1%}" if d <= len(r.acceptance) else "" for d in depths]
        before, after = r.nodes_before, r.nodes_after
        nodes = [f"{v:g}" for v in (after.p1, after.median, after.p99)] if after else ["", "", ""]
        cells.append(
            (f"{label(r)} {shape_words(r.method)}".strip(), r.dtype, r.method.accept or "",
             f"{r.method.temperature:g}", *shares, f"{before.median:g}" if before else "",
             *nodes, _saved(r))
        )  # fmt: skip
    return TextTable(
        "Share of steps in which each draft was accepted; nodes before and after merging prefixes",
        columns,
        tuple(cells),
        "; ".join(_chosen(r) for r in drafted if r.shapes and _open_shape(r.method)),
    )


def category_table(rows: Sequence[Row]) -> TextTable:
    """Return a table of each drafter's fastest shape by category, next to the baseline."""
    found = {(r.dtype, r.method, r.category): r for r in rows}
    fastest: dict[tuple[str, float, str | None], Row] = {}
    for r in rows:
        if r.method.name == "redrafter" and r.category == WHOLE and r.tps is not None:
            kind = (r.dtype, r.method.temperature, r.method.drafter)
            if kind not in fastest or r.tps.median > fastest[kind].tps.median:  # type: ignore[union-attr]
                fastest[kind] = r
    cells = []
    for best in fastest.values():
        method = best.method
        drafts = " ".join(filter(None, (method.drafter, method.accept, shape_words(method))))
        for r in rows:
            if (r.dtype, r.method) == (best.dtype, method):
                base = found.get((r.dtype, method.baseline(), r.category))
                cells.append(
                    (r.category, r.dtype, f"{method.temperature:g}", drafts, str(r.questions),
                     spread(base.tps if base else None), spread(r.tps), spread(r.speedup, "x"),
                     spread(r.tokens_per_step))
                )  # fmt: skip
    columns = ("category", "dtype", "T", "fastest", "questions", f"{BASELINE} tok/s", "tok/s",
               "speedup", "tokens/step")  # fmt: skip
    return TextTable("By category, the fastest shape", columns, tuple(cells))


def compare_table(
    changes: Sequence[Change], before: str, after: str, differing: Sequence[str]
) -> TextTable:
    """Return a table of the figures that two results share; the note tells what else differs."""
    cells = tuple(
        (_describe(c.row), c.figure, spread(c.before), spread(c.after), spread(c.ratio, "x"),
         c.verdict)
        for c in changes
    )  # fmt: skip
    columns = ("row", "figure", before, after, "ratio", "verdict")
    note = "Brackets hold 95% intervals. One comparison in twenty differs by chance alone."
    if differing:
        note += f" What else differs: {'; '.join(differing)}."
    return TextTable(f"{after} over {before}", columns, cells, note)


def spread(value: Spread | None, unit: str = "", scale: float = 1.0, digits: int = 2) -> str:
    """Format a figure, such as `31.42 [30.90, 31.80]`; empty for None."""
    if value is None:
        return ""
    median, low, high = (f"{v * scale:.{digits}f}" for v in (value.median, value.low, value.high))
    return f"{median}{unit}" if low == median == high else f"{median}{unit} [{low}, {high}]"


def label(row: Row | BatchRow | Energy) -> str:
    """Return the method's name, with the settings that distinguish it from others of that name."""
    method = row.method
    if method.draft_tokens is not None:
        return f"{method.name} ({method.draft_tokens} drafts)"
    name = method.name if method.drafter is None else f"{method.name}, {method.drafter}"
    if method.prefixes != "all":
        name += f" ({_PACKED[method.prefixes]})"
    if method.epsilon is not None or method.delta is not None:
        name += f" (epsilon {method.epsilon:g}, delta {method.delta:g})"
    if _open_shape(method) and not shape_words(method):
        name += " (automatic)" if method.automatic else " (default shape)"
    return name


def _describe(row: Mapping[str, object]) -> str:
    """Describe a row of a saved result in words."""
    named = [str(row[key]) for key in ("method", "drafter", "dtype") if row.get(key)]
    parts = named if row.get("batch_size") is None else [*named, f"batch of {row['batch_size']}"]
    W, L = row["beam_width"], row["beam_length"]
    if (W, L) != (None, None):
        parts.append(" x ".join("auto" if side is None else str(side) for side in (W, L)))
    if row["temperature"]:
        parts.append(f"{row['accept'] or ''} T {row['temperature']}".strip())
    for name in ("prefixes", "epsilon", "delta", "max_nodes", "draft_tokens", "prompt_tokens"):
        if row.get(name) not in (None, "all"):
            parts.append(f"{name.replace('_', ' ')} {row[name]}")
    return ", ".join([*parts, *([str(row["category"])] if row.get("category") else [])])


def shape_words(method: Method) -> str:
    """Return the beam shape, such as `2 x 4` or `2 x auto`; "" if no side of it is given."""
    sides = method.beam_width, method.beam_length
    return "" if sides == (None, None) else " x ".join(beam_side(method, side) for side in sides)


def beam_side(method: Method, size: int | None) -> str:
    """Return a beam's width or length, or who chooses it: `auto` or `default`; "" without beams."""
    if method.name != "redrafter":
        return ""
    return str(size) if size is not None else "auto" if method.automatic else "default"


def _open_shape(method: Method) -> bool:
    return method.name == "redrafter" and None in (method.beam_width, method.beam_length)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _saved(row: Row) -> str:
    """Return the mean share of the beams' tokens that merging saved (the paper's Figure 6)."""
    if row.nodes is None or row.nodes_before is None or row.method.beam_width is None:
        return ""
    return f"{1 - row.nodes / row.nodes_before.median:.0%}"


def _chosen(row: Row) -> str:
    """List the shapes that were chosen in at least 1% of the steps."""
    method = row.method
    chosen = ", ".join(f"{W} x {L} {share:.0%}" for W, L, share in row.shapes if share >= 0.01)
    which = ", ".join(filter(None, (row.dtype, method.drafter, method.accept)))
    return f"shapes chosen ({which}, T {method.temperature:g}): {chosen}"


def _equality(row: Row) -> str:
    if row.matches_baseline is None:
        return ""
    if row.matches_baseline:
        return "yes"
    return f"NO, {row.agreeing:.2%}" if row.agreeing is not None else "NO"


def _short(fingerprint: str | None) -> str:
    return "" if fingerprint is None else f" {fingerprint[: len('sha256:') + 12]}"
