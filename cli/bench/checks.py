"""Mistakes in the options of `bench` that are found before a model is loaded."""

from __future__ import annotations

from dataclasses import fields

from redrafter_mlx.bench.show.plot import check_plot
from redrafter_mlx.bench.show.report_folder import check_report
from redrafter_mlx.cli.bench.options import MOST_AT_ONCE, BenchOptions
from redrafter_mlx.cli.flag import option_name
from redrafter_mlx.config import check_drafter_bits, check_int
from redrafter_mlx.drafting.names import NONE
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.launched import launched_rank


def check_comparison(options: BenchOptions) -> None:
    """Raise BadInputError for an option that `--compare` does not use."""
    for option in fields(options):
        used = option.name in ("compare", "json")
        if not used and getattr(options, option.name) != option.default:
            raise BadInputError(f"--compare measures nothing; leave out {option_name(option.name)}")


def check_measurement(options: BenchOptions) -> None:
    """Raise BadInputError for every mistake that can be found without loading a model."""
    check_drafter_bits(options.drafter_bits, "--drafter-bits")
    for size in options.batch_sizes:
        check_int("--batch-size", size, 1, MOST_AT_ONCE)
    options.plan("", options.methods([None]))
    assert options.loadings
    in_turn = options.paper is not None and options.batch_size is not None
    if len(options.prompt_lengths) > 1 and not in_turn:
        raise BadInputError(f"--prompt-tokens is {options.prompt_tokens}; give one number")
    if launched_rank() is not None and len(options.loadings) > 1:
        raise BadInputError(f"--dtype is {options.dtype}; ranks share one model: give one")
    if options.plot is not None:
        if not (options.widths and options.lengths):
            raise BadInputError(
                f"--plot {options.plot} is a map of beam shapes; give --beam-width and "
                f"--beam-length"
            )
        check_plot(options.plot)
    if options.report is not None:
        check_report(options.report, options.answers)
    if NONE in options.drafters:
        for name in (
            "beam_width",
            "beam_length",
            "max_nodes",
            "prefixes",
            "accept",
            "epsilon",
            "delta",
        ):
            if getattr(options, name) != getattr(BenchOptions, name):
                raise BadInputError(f"{option_name(name)} needs a drafter; --drafter is none")
        if len(options.drafters) > 1:
            raise BadInputError(
                "--drafter none beside others measures nothing more, for plain decoding is "
                "always measured; leave it out"
            )
    if options.batch_size is None:
        return
    for name in ("draft_model", "plot", "report", "delay", "warmup"):
        if getattr(options, name) != getattr(BenchOptions, name):
            raise BadInputError(f"--batch-size has no use for {option_name(name)}; leave it out")
    if len(options.loadings) > 1:
        raise BadInputError(f"--dtype is {options.dtype}; give one with --batch-size")
