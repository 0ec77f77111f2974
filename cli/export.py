"""`redrafter-mlx export`: write a drafter in the format of another server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from redrafter_mlx.errors import BadInputError, ModelNotFoundError

if TYPE_CHECKING:
    from redrafter_mlx.drafting.export import ExportFormat


def command(
    *,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The drafter's folder.")],
    form: Annotated[
        str, typer.Option("--format", metavar="speculators|trtllm|medusa", help="Whose format.")
    ],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="DIR", help="[default: DIR-FORMAT]"),
    ] = None,
) -> None:
    """Write a drafter as another server reads it.

    speculators is for vLLM (EAGLE-3 and MLP speculators), trtllm for TensorRT-LLM's converter (the
    paper's form), medusa for Medusa's authors' code and text-generation-inference. What only we
    can read is refused.
    """
    from redrafter_mlx.drafting.export import ExportFormat, export_drafter

    known = get_args(ExportFormat)
    if form not in known:
        raise BadInputError(f"--format is {form!r}; choose one of {', '.join(known)}")
    source = Path(folder)
    if not source.is_dir():
        raise ModelNotFoundError(f"no drafter at {folder}; give a drafter's folder")
    written = (
        Path(output) if output else source.resolve().with_name(f"{source.resolve().name}-{form}")
    )
    export_drafter(source, written, cast("ExportFormat", form))
    print(written)
