"""`redrafter-mlx export`: write a drafter in the format of another server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from redrafter_mlx.checks import check_choice
from redrafter_mlx.cli.flag import Flag
from redrafter_mlx.cli.options import with_options
from redrafter_mlx.errors import BadInputError, ModelNotFoundError


@with_options
def command(
    *,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The drafter's folder.")],
    form: Annotated[str, Flag("Whose format.", "speculators|trtllm|medusa", names=("--format",))],
    output: Annotated[
        str | None, Flag("[default: DIR-FORMAT]", "DIR", names=("--output", "-o"))
    ] = None,
) -> None:
    """Write a drafter as another server reads it.

    speculators is for vLLM (EAGLE-3 and MLP speculators), trtllm for TensorRT-LLM's converter (the
    paper's form), medusa for Medusa's authors' code and text-generation-inference. What only we
    can read is refused.
    """
    from redrafter_mlx.drafting.files.export import ExportFormat, export_drafter

    check_choice("--format", form, ExportFormat)
    if not Path(folder).is_dir():
        raise ModelNotFoundError(f"no drafter at {folder}; give a drafter's folder")
    source = Path(folder).resolve()
    if output == "":
        raise BadInputError("--output is empty; give a folder, or leave it out")
    written = Path(output) if output else source.with_name(f"{source.name}-{form}")
    export_drafter(source, written, cast(ExportFormat, form))
    print(written)
