"""What `bench` measures for its options, and how the result is shown."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from rich.console import RenderableType

from redrafter_mlx.bench.analyse.compare import compare, differing, read_result
from redrafter_mlx.bench.analyse.grid import grids
from redrafter_mlx.bench.checks import check_measurement
from redrafter_mlx.bench.measure.answers import Answer
from redrafter_mlx.bench.options import BenchOptions, Loading
from redrafter_mlx.bench.paper_run import fill, run_paper
from redrafter_mlx.bench.papers.protocols import find_protocol
from redrafter_mlx.bench.papers.published import authors_grids
from redrafter_mlx.bench.session import Hooks, Outcome, run_session
from redrafter_mlx.bench.show.plot import check_plot, plot
from redrafter_mlx.bench.show.report import compare_table, heatmap, rendered, rich_table
from redrafter_mlx.bench.show.report_folder import check_report, write_report
from redrafter_mlx.bench.show.tables import header_lines
from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.bench.flags import Output
from redrafter_mlx.cli.progress import progress_bars
from redrafter_mlx.cli.terminal import INTERRUPTED, console
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.processes.launched import leave_to_rank_0
from redrafter_mlx.runtime.words import option_name
from redrafter_mlx.tuning.cost import CostModel


def run(options: BenchOptions, output: Output, given: Set[str]) -> int:
    """Measure what the options ask for, print it, and return the status; see `given_names`."""
    if output.compare is not None:
        leave_to_rank_0()
        if others := sorted(given - {"compare", "json"}):
            raise BadInputError(f"--compare measures nothing; leave out {option_name(others[0])}")
        _compare(output, *output.compare)
        return 0
    if output.paper is not None:
        if output.report is not None:
            raise BadInputError("--paper has no use for --report; leave it out")
        return _repeat_paper(output.paper, options, output, given)
    check_measurement(options)
    _check_output(options, output)
    return _answer_questions(options, output, given)


def _check_output(options: BenchOptions, output: Output) -> None:
    for name, path in (("--plot", output.plot), ("--report", output.report)):
        if path is not None and options.batch_sizes:
            raise BadInputError(f"--batch-size has no use for {name}; leave it out")
    if output.plot is not None:
        if not (options.widths and options.lengths):
            raise BadInputError(
                f"--plot {output.plot} is a map of beam shapes; give --beam-width and --beam-length"
            )
        check_plot(output.plot)
    if output.report is not None:
        check_report(output.report, options.answers)


def _load(
    options: BenchOptions, loading: Loading, drafter: str, engine: EngineOptions
) -> Redrafter:
    asked = opt.ModelOptions(
        options.model, loading.dtype, loading.quantize, options.offline, drafter,
        options.drafter_bits, options.draft_vocab, options.kv_bits, options.quantized_kv_start,
    )  # fmt: skip
    return opt.load_model(asked, engine, chat_or=None if options.raw else opt.RAW_INSTEAD)


_HOOKS = Hooks(_load, progress_bars)


def _status(outcome: Outcome) -> int:
    return INTERRUPTED if outcome.interrupted else int(outcome.failed)


def _answer_questions(options: BenchOptions, output: Output, given: Set[str]) -> int:
    profiles: dict[str, CostModel] = {}

    def profile(drafters: Mapping[str | None, Redrafter], answers: Sequence[Answer]) -> None:
        for name, redrafter in drafters.items():
            if redrafter.tuning is not None and redrafter.tuning.measured:
                dtypes = {answer.dtype for answer in answers}
                label = " ".join(filter(None, (*dtypes, name or redrafter.drafting)))
                profiles[label] = redrafter.tuning.costs

    hooks = replace(_HOOKS, inspect=profile, profiles=output.report is not None)
    outcome = run_session(options, hooks)
    (result,) = outcome.results
    _print(output, result.to_dict(), header_lines(result), rendered(result), result.notes)
    if output.report is not None:
        folder = write_report(output.report, result, profiles, _spelled([options, output], given))
        print(f"report in {folder}", file=sys.stderr)
    if output.plot is not None:
        if maps := grids(result.rows):
            m = result.machine
            plot(maps, output.plot, f"{m.chip} ({m.device}), mlx {m.mlx}")
        else:
            print(f"{output.plot} was not drawn: no shape has a speed", file=sys.stderr)
    return _status(outcome)


def _spelled(groups: Sequence[BenchOptions | Output], given: Set[str]) -> str:
    words = ["redrafter-mlx", "bench"]
    for name, value in ((n, v) for options in groups for n, v in vars(options).items()):
        if name not in given or value is None or value is False:
            continue
        option, values = option_name(name), value if isinstance(value, tuple) else (value,)
        words += [option] if value is True else [w for v in values for w in (option, str(v))]
    return shlex.join(words)


def _repeat_paper(name: str, options: BenchOptions, output: Output, given: Set[str]) -> int:
    """Run `--paper`, print its result, draw the picture of `--plot`, and return the exit status."""
    protocol = find_protocol(name)
    options = fill(protocol, options, given)
    if protocol.answers:
        if output.plot is not None and len(options.widths) * len(options.lengths) < 2:
            raise BadInputError(f"--paper {name} has one beam shape; leave out --plot")
        _check_output(options, output)
    run = run_paper(protocol, options, given, _HOOKS)
    results = run.outcome.results
    rows = [row for result in results for row in result.rows]
    maps, shown = [*grids(rows, min_cells=2)], [*map(rich_table, run.paper.tables)]
    if theirs := authors_grids(name, "float16"):
        maps += theirs
        shown = [*map(heatmap, maps), *shown]
    _print(
        output,
        {"paper": run.paper.to_dict(), "results": [result.to_dict() for result in results]},
        header_lines(results[0]) if results else (),
        shown,
        dict.fromkeys(note for result in results for note in result.notes),
    )
    if output.plot is not None:
        plot(maps, output.plot, f"{run.paper.published.paper}, {run.paper.published.number}")
    return _status(run.outcome)


def _compare(output: Output, before: str, after: str) -> None:
    first, second = read_result(before), read_result(after)
    changes, differences = compare(first.rows, second.rows), differing(first, second)
    record = {"changes": [change.to_dict() for change in changes], "differences": differences}
    table = rich_table(compare_table(changes, before, after, differences))
    _print(output, record, (), [table], ())


def _print(
    output: Output,
    record: Mapping[str, object],
    header: Iterable[str],
    drawn: Iterable[RenderableType],
    notes: Iterable[str],
) -> None:
    """Print the record as JSON, or else the header, tables and heatmaps, and the notes."""
    if output.json:
        print(json.dumps(record), flush=True)
        return
    for line in header:
        print(line)
    for each in drawn:
        console().print(each)
    for note in notes:
        print(note)
