"""Mistakes in the options of a measurement that are found before a model is loaded."""

from __future__ import annotations

from redrafter_mlx.bench.options import MAX_AT_ONCE, BenchOptions
from redrafter_mlx.checks import check_drafter_bits, check_int
from redrafter_mlx.drafting.names import NONE
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.processes.launched import launched_rank
from redrafter_mlx.runtime.words import option_name

_OF_DRAFTERS = (
    "beam_width", "beam_length", "max_nodes", "prefixes", "accept", "epsilon", "delta",
)  # fmt: skip


def check_measurement(options: BenchOptions, lengths: int | None = 1) -> None:
    """Raise BadInputError for mistakes, or for more than `lengths` lengths of prompts."""
    check_drafter_bits(options.drafter_bits, "--drafter-bits")
    for size in options.batch_sizes:
        check_int("--batch-size", size, 1, MAX_AT_ONCE)
    options.plan("", options.methods([None]))
    assert options.loadings
    if lengths is not None and len(options.prompt_lengths) > lengths:
        raise BadInputError(f"--prompt-tokens is {options.prompt_tokens}; give one number")
    if launched_rank() is not None and len(options.loadings) > 1:
        raise BadInputError(f"--dtype is {options.dtype}; ranks share one model: give one")
    if NONE in options.drafters:
        if name := _changed(options, _OF_DRAFTERS):
            raise BadInputError(f"{name} needs a drafter; --drafter is none")
        if len(options.drafters) > 1:
            raise BadInputError(
                "--drafter none beside others measures nothing more, for plain decoding is "
                "always measured; leave it out"
            )
    if options.batch_sizes:
        if options.draft_model is not None:
            raise BadInputError("--batch-size has no use for --draft-model; leave it out")
        if len(options.loadings) > 1:
            raise BadInputError(f"--dtype is {options.dtype}; give one with --batch-size")


def _changed(options: BenchOptions, names: tuple[str, ...]) -> str | None:
    """Return the first of these options that is not at its default, as users write it."""
    changed = (n for n in names if getattr(options, n) != getattr(BenchOptions, n))
    return next(map(option_name, changed), None)
