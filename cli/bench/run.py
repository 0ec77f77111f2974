"""What `bench` measures for its options, and how the result is shown."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields

from rich.console import RenderableType

from redrafter_mlx.bench.analyse.compare import compare, differing, read_result
from redrafter_mlx.bench.analyse.grid import grids
from redrafter_mlx.bench.measure.answers import Answer
from redrafter_mlx.bench.papers.published import authors_grids
from redrafter_mlx.bench.show.comparison import compare_table
from redrafter_mlx.bench.show.plot import plot
from redrafter_mlx.bench.show.report import heatmap, rendered, rich_table
from redrafter_mlx.bench.show.report_folder import write_report
from redrafter_mlx.bench.show.tables import header_lines
from redrafter_mlx.cli.bench.checks import check_comparison, check_measurement
from redrafter_mlx.cli.bench.options import BenchOptions
from redrafter_mlx.cli.bench.paper import run_paper
from redrafter_mlx.cli.bench.session import run_session
from redrafter_mlx.cli.flag import option_name
from redrafter_mlx.cli.terminal import console
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.launched import leave_to_rank_0
from redrafter_mlx.tuning.cost import CostModel


def run(options: BenchOptions, given: Set[str]) -> int:
    """Measure what the options ask for, print it, and return the exit status.

    given: names of the options that the command line sets
    """
    if options.compare is not None:
        leave_to_rank_0()
        check_comparison(options)
        _compare(options, *options.compare)
        return 0
    if options.paper is not None:
        if options.report is not None:
            raise BadInputError("--paper has no use for --report; leave it out")
        return _repeat_paper(options, given)
    check_measurement(options)
    return _answer_questions(options, given)


def _answer_questions(options: BenchOptions, given: Set[str]) -> int:
    """Measure answers to the questions, with `--report` and `--plot`."""
    profiles: dict[str, CostModel] = {}

    def profile(drafters: Mapping[str | None, Redrafter], answers: Sequence[Answer]) -> None:
        for name, redrafter in drafters.items():
            if redrafter.tuning is not None and redrafter.tuning.measured:
                dtypes = {answer.dtype for answer in answers}
                label = " ".join(filter(None, (*dtypes, name or redrafter.drafting)))
                profiles[label] = redrafter.tuning.costs

    (result,), status, _ = run_session(options, profile)
    _print(options, result.to_dict(), header_lines(result), rendered(result), result.notes)
    if options.report is not None:
        folder = write_report(options.report, result, profiles, _spelled(options, given))
        print(f"report in {folder}", file=sys.stderr)
    if options.plot is not None:
        if maps := grids(result.rows):
            m = result.machine
            plot(maps, options.plot, f"{m.chip} ({m.device}), mlx {m.mlx}")
        else:
            print(f"{options.plot} was not drawn: no shape has a speed", file=sys.stderr)
    return status


def _spelled(options: BenchOptions, given: Set[str]) -> str:
    """Return the command line that sets these options."""
    words = ["redrafter-mlx", "bench"]
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in given or value is None or value is False:
            continue
        option, values = option_name(field.name), value if isinstance(value, tuple) else (value,)
        words += [option] if value is True else [w for v in values for w in (option, str(v))]
    return shlex.join(words)


def _repeat_paper(options: BenchOptions, given: Set[str]) -> int:
    """Run `--paper`, print its result, draw the picture of `--plot`, and return the exit status."""
    run = run_paper(options, given)
    rows = [row for result in run.results for row in result.rows]
    maps, shown = [*grids(rows, least=2)], [*map(rich_table, run.paper.tables)]
    if theirs := authors_grids(run.paper.name, "float16"):
        maps += theirs
        shown = [*map(heatmap, maps), *shown]
    _print(
        options,
        {"paper": run.paper.to_dict(), "results": [result.to_dict() for result in run.results]},
        header_lines(run.results[0]) if run.results else (),
        shown,
        dict.fromkeys(note for result in run.results for note in result.notes),
    )
    if options.plot is not None:
        plot(maps, options.plot, f"{run.paper.published.paper}, {run.paper.published.number}")
    return run.status


def _compare(options: BenchOptions, before: str, after: str) -> None:
    """Print a comparison of two saved results."""
    first, second = read_result(before), read_result(after)
    changes, differences = compare(first.rows, second.rows), differing(first, second)
    record = {"changes": [change.to_dict() for change in changes], "differences": differences}
    table = rich_table(compare_table(changes, before, after, differences))
    _print(options, record, (), [table], ())


def _print(
    options: BenchOptions,
    record: Mapping[str, object],
    header: Iterable[str],
    drawn: Iterable[RenderableType],
    notes: Iterable[str],
) -> None:
    """Print the record as JSON, or else the header, tables and heatmaps, and the notes."""
    if options.json:
        print(json.dumps(record), flush=True)
        return
    for line in header:
        print(line)
    for each in drawn:
        console().print(each)
    for note in notes:
        print(note)
