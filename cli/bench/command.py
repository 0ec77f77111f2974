"""`redrafter-mlx bench`: measure drafted decoding against plain decoding."""

from __future__ import annotations

from typing import Annotated

import typer

from redrafter_mlx.bench.options import BenchOptions
from redrafter_mlx.cli.bench.flags import FLAGS, Output
from redrafter_mlx.cli.options import given_names, with_options
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.awake import kept_awake


@with_options
def command(
    *, context: typer.Context, output: Output, options: Annotated[BenchOptions, FLAGS]
) -> None:
    """Measure plain and drafted decoding in one run, question by question, on this machine.

    Speedups are over mlx-lm's own loop in the same run. Exits 1 if our greedy tokens are not
    mlx-lm's where they must be.

    Example: redrafter-mlx bench qwen3-8b --beam-width 1..4 --beam-length 4
    """
    if options.model == "serve":
        raise BadInputError("`bench serve` takes its options after `serve`")
    if output.report in ("json", "table"):
        raise BadInputError(
            f"--output is {output.report}, and it names the folder of a report; for one JSON "
            f"object, give --json"
        )
    from redrafter_mlx.cli.bench.run import run

    with kept_awake():
        raise typer.Exit(run(options, output, given_names(context)))
