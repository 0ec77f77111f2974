"""`redrafter-mlx bench`: measure drafted decoding against plain decoding."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import typer

from redrafter_mlx.cli.bench.checks import check_comparison, check_measurement, check_output
from redrafter_mlx.cli.bench.options import BenchOptions
from redrafter_mlx.cli.options import with_options
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.awake import kept_awake
from redrafter_mlx.runtime.launched import leave_to_rank_0

if TYPE_CHECKING:
    from rich.console import Console

    from redrafter_mlx.autotune.cost_model import CostModel
    from redrafter_mlx.bench.analyse.batch_summary import BatchResult
    from redrafter_mlx.bench.analyse.result import Result
    from redrafter_mlx.bench.measure.answers import Answer
    from redrafter_mlx.engine.engine import Redrafter


@with_options
def command(*, context: typer.Context, options: BenchOptions) -> None:
    """Measure plain and drafted decoding in one run, question by question, on this machine.

    Speedups are over mlx-lm's own loop in the same run. Exits 1 if our greedy tokens are not
    mlx-lm's where they must be.

    Example: redrafter-mlx bench --beam-width 1..4 --beam-length 4
    """
    if context.invoked_subcommand is not None:
        leave_to_rank_0()
        if options != BenchOptions():
            raise BadInputError("`bench serve` takes its options after `serve`")
        return
    check_output(options)
    with kept_awake():
        status = _run(options, given_options(context))
    raise typer.Exit(status)


def _run(options: BenchOptions, given: frozenset[str]) -> int:
    """Measure what the options ask for, print it, and return the exit status."""
    if options.compare is not None:
        leave_to_rank_0()
        check_comparison(options)
        print_comparison(*options.compare, as_json=options.output == "json")
        return 0
    if options.paper is not None:
        if options.report is not None or options.energy:
            option = "--energy" if options.energy else "--report"
            raise BadInputError(f"--paper has no use for {option}; leave it out")
        return print_paper(options, given)
    check_measurement(options)
    if options.batch_size is not None:
        from redrafter_mlx.cli.bench.batches import run_batches, status_of

        ((_, batches),) = run_batches(options)
        print_batches(batches, options)
        return status_of([batches])
    return _answer_questions(options, given)


def _answer_questions(options: BenchOptions, given: frozenset[str]) -> int:
    """Measure answers to the questions one by one, with `--energy` and `--report`."""
    from redrafter_mlx.cli.bench.session import run_session

    profiles: dict[str, CostModel] = {}

    def profile(drafters: Mapping[str | None, Redrafter], answers: Sequence[Answer]) -> None:
        for name, redrafter in drafters.items():
            if redrafter.tuning is not None and redrafter.tuning.measured:
                dtypes = {answer.dtype for answer in answers}
                label = " ".join(filter(None, (*dtypes, name or redrafter.drafting)))
                profiles[label] = redrafter.tuning.costs

    if options.energy:
        from redrafter_mlx.bench.analyse.energy import energy_of
        from redrafter_mlx.bench.measure.energy import power_meter

        with power_meter() as meter:
            outcome = run_session(options, profile)
        energy = energy_of(outcome.answers, meter.joules)
        result = replace(outcome.result, energy=energy)
    else:
        outcome = run_session(options, profile)
        result = outcome.result
    print_result(result, options)
    if options.report is not None:
        from redrafter_mlx.bench.show.report_folder import write_report

        folder = write_report(options.report, result, profiles, spelled(options, given))
        print(f"report in {folder}", file=sys.stderr)
    draw(result, options)
    return outcome.status


def given_options(context: typer.Context) -> frozenset[str]:
    """Return the names of the options that the command line sets."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(
        name for name, source in sources.items() if source is not None and source.name != "DEFAULT"
    )


def spelled(options: BenchOptions, given: frozenset[str]) -> str:
    """Return the command line that sets these options."""
    words = ["redrafter-mlx", "bench"]
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in given or value is None or value is False:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        values = value if isinstance(value, tuple) else (value,)
        words += [flag] if value is True else [w for v in values for w in (flag, str(v))]
    return shlex.join(words)


def print_paper(options: BenchOptions, given: frozenset[str]) -> int:
    """Run `--paper`, print its result, draw the picture of `--plot`, and return the exit status."""
    from redrafter_mlx.bench.analyse.grid import grids
    from redrafter_mlx.bench.analyse.result import Result
    from redrafter_mlx.bench.papers.published import CHIPS, authors_grid
    from redrafter_mlx.bench.show.plot import plot
    from redrafter_mlx.bench.show.report import heatmap, rich_table
    from redrafter_mlx.bench.show.tables import header_lines
    from redrafter_mlx.cli.bench.paper import run_paper

    run = run_paper(options, given)
    rows = [row for result in run.results if isinstance(result, Result) for row in result.rows]
    maps = [*grids(rows, least=2)]
    if run.paper.name == "table2":
        maps += [authors_grid(chip, "float16") for chip in CHIPS]
    if options.output == "json":
        results = [result.to_dict() for result in run.results]
        print(json.dumps({"paper": run.paper.to_dict(), "results": results}), flush=True)
    else:
        out = console()
        for line in header_lines(run.results[0]) if run.results else ():
            print(line)
        for grid in maps if run.paper.name == "table2" else ():
            out.print(heatmap(grid))
        for table in run.paper.tables:
            out.print(rich_table(table))
        for note in dict.fromkeys(note for result in run.results for note in result.notes):
            print(note)
    if options.plot is not None:
        plot(maps, options.plot, f"{run.paper.published.paper}, {run.paper.published.number}")
    return run.status


def print_result(result: Result, options: BenchOptions) -> None:
    """Print the result in the chosen format."""
    from redrafter_mlx.bench.show.report import show

    if options.output == "json":
        print(json.dumps(result.to_dict()), flush=True)
    else:
        show(result, console())


def draw(result: Result, options: BenchOptions) -> None:
    """Draw the picture of `--plot`, if it was asked for."""
    from redrafter_mlx.bench.analyse.grid import grids
    from redrafter_mlx.bench.show.plot import plot

    if options.plot is not None:
        m = result.machine
        plot(grids(result.rows), options.plot, f"{m.chip} ({m.device}), mlx {m.mlx}")


def print_batches(result: BatchResult, options: BenchOptions) -> None:
    """Print the result of `--batch-size` in the chosen format."""
    from redrafter_mlx.bench.show.batch_tables import batch_table
    from redrafter_mlx.bench.show.report import rich_table
    from redrafter_mlx.bench.show.tables import header_lines

    if options.output == "json":
        print(json.dumps(result.to_dict()), flush=True)
        return
    for line in header_lines(result):
        print(line)
    console().print(rich_table(batch_table(result.rows)))
    for note in result.notes:
        print(note)


def print_comparison(before: str, after: str, *, as_json: bool) -> None:
    """Print a comparison of two saved results."""
    from redrafter_mlx.bench.analyse.compare import compare, differing, read_result
    from redrafter_mlx.bench.show.report import rich_table
    from redrafter_mlx.bench.show.tables import compare_table

    first, second = read_result(before), read_result(after)
    changes, differences = compare(first.rows, second.rows), differing(first, second)
    if as_json:
        shown = {"changes": [change.to_dict() for change in changes], "differences": differences}
        print(json.dumps(shown))
    else:
        console().print(rich_table(compare_table(changes, before, after, differences)))


def console() -> Console:
    """Return a console for tables; in a pipe it is 200 columns wide, so that no cell is folded."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200)
