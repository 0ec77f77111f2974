"""`redrafter-mlx bench`: measure drafted decoding against plain decoding."""

from __future__ import annotations

import typer

from redrafter_mlx.cli.bench.options import FORMATS, BenchOptions
from redrafter_mlx.cli.options import with_options
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.awake import kept_awake
from redrafter_mlx.runtime.launched import leave_to_rank_0


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
    if options.output not in FORMATS:
        raise BadInputError(
            f"--output is {options.output!r}; choose one of {', '.join(FORMATS)}; a folder is "
            f"--report DIR"
        )
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source and source.name != "DEFAULT"}
    from redrafter_mlx.cli.bench.run import run

    with kept_awake():
        raise typer.Exit(run(options, given))
