"""Cost curves as tables and as a picture."""

from __future__ import annotations

from pathlib import Path

from redrafter_mlx.autotune.cost_model import CostCurves
from redrafter_mlx.bench.show.plot import check_plot
from redrafter_mlx.errors import BadInputError


def describe_curves(curves: CostCurves) -> str:
    """Every measured time in milliseconds, and the cliffs."""
    long = dict(curves.long)
    cliffs = {c.rows: c.jump for c in curves.cliffs()}
    head = f"{'rows':>4}  {curves.short_context:>6} tokens  {curves.long_context:>6} tokens"
    lines = ["the target's call, ms", head]
    for rows, seconds in curves.short:
        behind = f"{1e3 * long[rows]:>13.2f}" if rows in long else f"{'':>13}"
        jump = f"   cliff: one row more costs {cliffs[rows]:.0%}" if rows in cliffs else ""
        lines.append(f"{rows:>4}  {1e3 * seconds:>13.2f}  {behind}{jump}".rstrip())
    lengths = sorted({n for _, n, _ in curves.draft})
    lines += ["", "drafting, ms", "W \\ L " + "".join(f"{n:>9}" for n in lengths)]
    for width in sorted({w for w, *_ in curves.draft}):
        times = {n: s for w, n, s in curves.draft if w == width}
        lines.append(f"{width:>5} " + "".join(f"{1e3 * times[n]:>9.2f}" for n in lengths))
    lines += [
        "",
        f"the rest of a step: {1e3 * curves.plain_rest:.2f} ms plain, "
        f"{1e3 * curves.chain_rest:.2f} ms with one beam, "
        f"{1e3 * curves.drafted_rest:.2f} ms with several",
        f"measurements of the same thing differ by {curves.spread:.0%}, typically",
    ]
    return "\n".join(lines)


def plot_curves(curves: CostCurves, path: str | Path) -> None:
    """The staircase of the target's call at both contexts, and drafting over lengths.

    Raises BadInputError as `check_plot`.
    """
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    calls, drafts = figure.subplots(1, 2, width_ratios=[2, 1])
    for name, curve in ((curves.short_context, curves.short), (curves.long_context, curves.long)):
        rows, seconds = zip(*curve, strict=True)
        calls.step(rows, [1e3 * s for s in seconds], where="mid", marker="o", markersize=3,
                   label=f"behind {name} tokens")  # fmt: skip
    for cliff in curves.cliffs():
        calls.axvline(cliff.rows + 0.5, color="grey", linewidth=0.8, linestyle="--")
    calls.set(xlabel="rows", ylabel="ms", title="the target's call; dashed: cliffs")
    for width in sorted({w for w, *_ in curves.draft}):
        line = [(n, 1e3 * s) for w, n, s in curves.draft if w == width]
        drafts.plot(*zip(*line, strict=True), marker="o", markersize=3, label=f"width {width}")
    drafts.set(xlabel="length", ylabel="ms", title="drafting")
    for axes in (calls, drafts):
        axes.set_ylim(bottom=0)
        axes.legend()
    on = curves.setup
    figure.suptitle(f"{on.chip}, {on.dtype}, mlx {on.mlx}", fontsize=10)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BadInputError(f"--plot is {path}: {error.strerror or error}") from None
