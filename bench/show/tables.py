"""The result as tables of text, before they are drawn or printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redrafter_mlx.bench.analyse.result import Result
from redrafter_mlx.bench.analyse.summary import Row
from redrafter_mlx.bench.measure.methods import BASELINE, Method
from redrafter_mlx.bench.measure.questions import WHOLE
from redrafter_mlx.bench.statistics import Spread
from redrafter_mlx.runtime.words import count

OUT_OF_MEMORY = "OOM"
"""Cell of a batch that does not fit in memory, as the papers have it."""


@dataclass(frozen=True)
class TextTable:
    """A heading, column names and cells, with a note below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    @classmethod
    def of(cls, title: str, lines: Sequence[Mapping[str, str]], note: str = "") -> TextTable:
        """Return a table of lines that give their cells by column name, in the order of columns."""
        columns = dict.fromkeys(name for line in lines for name in line)
        rows = tuple(tuple(line.get(name, "") for name in columns) for line in lines)
        return cls(title, tuple(columns) or ("nothing was measured",), rows, note)


def tables_of(result: Result) -> list[TextTable]:
    """Return all tables of a result, which are everything but the heatmaps."""
    whole = [r for r in result.rows if r.category == WHOLE]
    if any(r.method.batch_size is not None for r in whole):
        return [batch_table(whole)]
    found = [main_table(whole), acceptance_table(whole)]
    if any(r.category != WHOLE for r in result.rows):
        found.append(category_table(result.rows))
    return [table for table in found if table.rows]


def header_lines(result: Result) -> list[str]:
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
    if p.asked > 1:
        brackets = "; 95% intervals in brackets"
    else:  # which says nothing of other questions
        brackets = "; brackets hold the scatter of its repeats" if p.repeats > 1 else ""
    lines.append(
        f"{count(p.asked, 'question')} ({p.questions}), {count(p.max_tokens, 'token')}, each "
        f"{repeats}{brackets}"
    )
    return lines


def main_table(rows: Sequence[Row]) -> TextTable:
    """Return a table of the methods over all questions."""
    dtypes = len({r.dtype for r in rows}) > 1
    sampled = any(r.method.temperature > 0 for r in rows)
    padded = any(r.query_rows != r.nodes for r in rows)
    lines = [
        {
            "method": label(r),
            **({"dtype": r.dtype} if dtypes else {}),
            **(drawn(r) if sampled else {}),
            **shape(r),
            "N": number(r.nodes),
            **({"padded to": number(r.query_rows)} if padded else {}),
            **figures(r),
            "first token": spread(r.first_token, " ms", 1000, 0),
            "peak GB": f"{r.peak_memory:.2f}",
            "same tokens": _equality(r),
        }
        for r in rows
    ]
    note = (
        "N: nodes verified in a step, the mean of those counted in the trees. peak GB counts the "
        "weights of all that is loaded, other drafters too."
    )
    title = f"Tokens a second after the first token; speedup over {BASELINE}"
    return TextTable.of(title, lines, note)


def batch_table(rows: Sequence[Row]) -> TextTable:
    """Return a table of batch sizes and methods, as in the paper's Table 3."""
    sampled = any(r.method.temperature > 0 for r in rows)
    lines = [
        {
            "batch": str(r.method.batch_size),
            "method": label(r),
            **(drawn(r) if sampled else {}),
            **shape(r),
            "tok/s each": OUT_OF_MEMORY if r.out_of_memory else spread(r.tps),
            "total tok/s": spread(r.total_tps),
            "over mlx-lm's batch": spread(r.speedup, "x"),
            "over plain": spread(r.over_plain, "x"),
            "tokens/step": "" if r.out_of_memory else spread(r.tokens_per_step),
            "first token": "" if r.out_of_memory else spread(r.first_token, " ms", 1000, 0),
            "peak": f"{r.peak_memory:.2f} GB",
            "mlx-lm's tokens": _equality(r),
        }
        for r in rows
    ]
    note = (
        "batch: requests at once; first token: when each of them has it and the clock starts; "
        "over plain: over our own batches without drafts"
    ) + ("; OOM: does not fit in memory" if any(r.out_of_memory for r in rows) else "")
    return TextTable.of("Requests at once", lines, note)


def acceptance_table(rows: Sequence[Row]) -> TextTable:
    """Return acceptance by draft position (to the eighth, then one in eight), and merging."""
    drafted = [r for r in rows if r.acceptance or r.nodes_after]
    deepest = max((len(r.acceptance) for r in drafted), default=0)
    depths = [d for d in range(1, deepest + 1) if d <= 8 or d % 8 == 0 or d == deepest]
    lines = [
        {"method": f"{label(r)} {shape_words(r.method)}".strip(), "dtype": r.dtype, **drawn(r),
         **{f"draft {d}": accepted_at(r, d) for d in depths}, **merged(r, "nodes before", "after")}
        for r in drafted
    ]  # fmt: skip
    return TextTable.of(
        "Share of steps in which each draft was accepted; nodes before and after merging prefixes",
        lines,
        "; ".join(_chosen(r) for r in drafted if r.shapes and r.method.open_shape),
    )


def category_table(rows: Sequence[Row]) -> TextTable:
    """Return a table of each drafter's fastest shape by category, next to the baseline."""
    found = {(r.dtype, r.method, r.category): r for r in rows}
    fastest: dict[tuple[str, float, str | None], tuple[float, Row]] = {}
    for r in rows:
        if r.method.name == "redrafter" and r.category == WHOLE and r.tps is not None:
            kind, tps = (r.dtype, r.method.temperature, r.method.drafter), r.tps.median
            if kind not in fastest or tps > fastest[kind][0]:
                fastest[kind] = tps, r
    lines = []
    for _, best in fastest.values():
        method = best.method
        drafts = " ".join(filter(None, (method.drafter, method.accept, shape_words(method))))
        for r in rows:
            if (r.dtype, r.method) == (best.dtype, method):
                base = found.get((r.dtype, method.baseline(), r.category))
                lines.append(
                    {"category": r.category, "dtype": r.dtype, "T": f"{method.temperature:g}",
                     "fastest": drafts, "questions": str(r.questions),
                     f"{BASELINE} tok/s": spread(base.tps if base else None), **figures(r)}
                )  # fmt: skip
    return TextTable.of("By category, the fastest shape", lines)


def spread(value: Spread | None, unit: str = "", scale: float = 1.0, digits: int = 2) -> str:
    """Format a figure, such as `31.42 [30.90, 31.80]`; empty for None."""
    if value is None:
        return ""
    median, low, high = (f"{v * scale:.{digits}f}" for v in (value.median, value.low, value.high))
    return f"{median}{unit}" if low == median == high else f"{median}{unit} [{low}, {high}]"


def number(value: float | None, form: str = ".3g", unit: str = "") -> str:
    """Format a number; empty for None."""
    return "" if value is None else f"{value:{form}}{unit}"


def figures(row: Row) -> dict[str, str]:
    return {
        "tok/s": spread(row.tps),
        "speedup": spread(row.speedup, "x"),
        "tokens/step": spread(row.tokens_per_step),
    }


def shape(row: Row) -> dict[str, str]:
    method = row.method
    sides = {"W": method.beam_width, "L": method.beam_length}
    return {name: beam_side(method, side) for name, side in sides.items()}


def drawn(row: Row) -> dict[str, str]:
    return {"accept": row.method.accept or "", "T": f"{row.method.temperature:g}"}


def merged(row: Row, before: str, after: str) -> dict[str, str]:
    """Return the tokens in the beams, the nodes that merging left of them, and the share saved."""
    tokens, nodes = row.nodes_before, row.nodes_after
    saved = None if tokens is None or row.nodes is None else 1 - row.nodes / tokens.median
    return {
        before: f"{tokens.median:g}" if tokens else "",
        f"{after}: 1%": f"{nodes.p1:g}" if nodes else "",
        "median": f"{nodes.median:g}" if nodes else "",
        "99%": f"{nodes.p99:g}" if nodes else "",
        "saved": number(None if row.method.beam_width is None else saved, ".0%"),
    }


def accepted_at(row: Row, depth: int) -> str:
    """Return the share of steps in which the draft at this depth was accepted."""
    return f"{row.acceptance[depth - 1]:.1%}" if depth <= len(row.acceptance) else ""


def label(row: Row) -> str:
    """Return the method's name, with the settings that distinguish it from others of that name."""
    method = row.method
    if method.draft_tokens is not None:
        return f"{method.name} ({method.draft_tokens} drafts)"
    name = method.name if method.drafter is None else f"{method.name}, {method.drafter}"
    packed = {"final": " (final candidates alone)", "separate": " (candidates separately)"}
    name += packed.get(method.prefixes, "")
    if method.epsilon is not None or method.delta is not None:
        name += f" (epsilon {method.epsilon:g}, delta {method.delta:g})"
    if method.open_shape and not shape_words(method):
        name += " (automatic)" if method.automatic else " (default shape)"
    return name


def shape_words(method: Method) -> str:
    """Return the beam shape, such as `2 x 4` or `2 x auto`; "" if no side of it is given."""
    sides = method.beam_width, method.beam_length
    return "" if sides == (None, None) else " x ".join(beam_side(method, side) for side in sides)


def beam_side(method: Method, size: int | None) -> str:
    """Return a beam's width or length, or who chooses it: `auto` or `default`; "" without beams."""
    if method.name != "redrafter":
        return ""
    return str(size) if size is not None else "auto" if method.automatic else "default"


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
