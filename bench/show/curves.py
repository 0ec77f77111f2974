"""A cost model shown as tables and as a picture."""

from __future__ import annotations

from pathlib import Path

from redrafter_mlx.bench.show.plot import check_plot, save_figure
from redrafter_mlx.tuning.cost import CostModel


def describe_curves(costs: CostModel) -> str:
    """Return all measured times in milliseconds, and the cliffs, as text."""
    long = dict(costs.long)
    cliffs = costs.cliffs()
    head = f"{'rows':>4}  {costs.short_context:>6} tokens  {costs.long_context:>6} tokens"
    lines = ["the target's call by query rows, ms", head]
    for rows, seconds in costs.short:
        later = f"{1e3 * long[rows]:>13.2f}" if rows in long else f"{'':>13}"
        jump = f"   cliff: one row more costs {cliffs[rows]:.0%}" if rows in cliffs else ""
        lines.append(f"{rows:>4}  {1e3 * seconds:>13.2f}  {later}{jump}".rstrip())
    lengths = sorted({n for _, n, _ in costs.draft})
    lines += ["", "drafting, ms", "W \\ L " + "".join(f"{n:>9}" for n in lengths)]
    for width in sorted({w for w, *_ in costs.draft}):
        times = {n: f"{1e3 * s:.2f}" for w, n, s in costs.draft if w == width}
        lines.append(f"{width:>5} " + "".join(f"{times.get(n, ''):>9}" for n in lengths).rstrip())
    lines += ["", f"measurements of the same thing differ by {costs.spread:.0%}, typically"]
    return "\n".join(lines)


def plot_curves(costs: CostModel, path: str | Path) -> None:
    """Plot the target's call by query rows, and drafting by length; errors of `check_plot`."""
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    calls, drafts = figure.subplots(1, 2, width_ratios=[2, 1])
    for name, curve in ((costs.short_context, costs.short), (costs.long_context, costs.long)):
        rows, seconds = zip(*curve, strict=True)
        calls.step(rows, [1e3 * s for s in seconds], where="mid", marker="o", markersize=3,
                   label=f"after {name} tokens")  # fmt: skip
    for rows_before in costs.cliffs():
        calls.axvline(rows_before + 0.5, color="grey", linewidth=0.8, linestyle="--")
    calls.set(xlabel="query rows", ylabel="ms", title="the target's call; dashed: cliffs")
    for width in sorted({w for w, *_ in costs.draft}):
        line = [(n, 1e3 * s) for w, n, s in costs.draft if w == width]
        drafts.plot(*zip(*line, strict=True), marker="o", markersize=3, label=f"width {width}")
    drafts.set(xlabel="length", ylabel="ms", title="drafting")
    for axes in (calls, drafts):
        axes.set_ylim(bottom=0)
        axes.legend()
    on = costs.setup
    figure.suptitle(f"{on.chip}, {on.dtype}, mlx {on.mlx}", fontsize=10)
    save_figure(figure, path)
