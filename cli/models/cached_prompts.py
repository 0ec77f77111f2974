"""`redrafter-mlx cache`: the prompts that servers keep on disk, and their removal."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.flag import Flag
from redrafter_mlx.cli.models.command import print_table
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files.paths import human_size, prompts_dir


@opt.with_options
def command(
    action: Annotated[
        str, typer.Argument(metavar="list|clear", help="Show them, or remove all of them.")
    ] = "list",
    *,
    cache_dir: Annotated[
        str | None,
        Flag("The folder, if the server was given another one. [default: in our cache]", "DIR"),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """List what `serve --cache-dir` keeps of prompts for after a restart, or remove it.

    They hold what was typed, and only their owner can read them. On a terminal, clear asks first.
    """
    from redrafter_mlx.decoding.cache.prefix_store import stored_files

    if action not in ("list", "clear"):
        raise BadInputError(f"{action!r:.80} is neither list nor clear")
    folder = prompts_dir() if cache_dir is None else Path(cache_dir)
    files = stored_files(folder)
    size = human_size(sum(file.nbytes for file in files))
    if action == "clear":
        if files and sys.stdin.isatty() and sys.stderr.isatty():
            typer.confirm(f"remove {len(files)} prompts ({size})?", abort=True, err=True)
        for file in files:
            file.path.unlink(missing_ok=True)
        print(f"removed {len(files)} prompts ({size}) from {folder}")
    elif as_json:
        print(json.dumps([{"path": str(f.path), "bytes": f.nbytes, "used": f.used} for f in files]))
    elif not files:
        print(f"no prompts in {folder}; `redrafter-mlx serve --cache-dir DIR` keeps them")
    else:
        print_table(
            ("FILE", "SIZE", "LAST USED"),
            [
                (
                    file.path.name[:12],
                    human_size(file.nbytes),
                    time.strftime("%Y-%m-%d %H:%M", time.localtime(file.used)),
                )
                for file in files
            ],
        )
