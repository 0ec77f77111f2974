"""`redrafter-mlx cache` and `corpora`: what servers and training keep on disk, and its removal."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.flag import Flag
from redrafter_mlx.cli.models.command import print_table
from redrafter_mlx.cli.terminal import confirm, sanitise
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files.paths import human_size, prompts_dir


@opt.with_options
def cache(
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
        if files:
            confirm(f"remove {len(files)} prompts ({size})?")
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


@opt.with_options
def corpora(
    *,
    remove: Annotated[
        list[str] | None,
        Flag("Remove the corpus of this key, or its beginning. Several times for several.", "KEY"),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """List the corpora that `train` has written, the largest first, or remove some.

    A drafter needs its corpus only while it is trained; another run with the same texts uses it
    again. On a terminal, --remove asks first.
    """
    from redrafter_mlx.distill.corpus.stored import find_corpus, list_corpora, remove_corpus

    if remove and as_json:
        raise BadInputError(
            "--json lists corpora, and --remove removes some; leave out one of both"
        )
    for corpus in [find_corpus(key) for key in dict.fromkeys(remove or ())]:
        what = f"{corpus.key} ({sanitise(corpus.model or 'unknown model')}, "
        what += f"{human_size(corpus.nbytes)})"
        confirm(f"remove {what}?")
        remove_corpus(corpus)
        print(f"removed {what}")
    if remove:
        return
    listed = list_corpora()
    if as_json:
        print(json.dumps([{**asdict(corpus), "path": str(corpus.path)} for corpus in listed]))
        return
    if not listed:
        print("no corpora; `redrafter-mlx train` writes them")
        return
    print_table(
        ("KEY", "MODEL", "ANSWER TOKENS", "SIZE", "WRITTEN"),
        [
            (
                corpus.key,
                corpus.model or "unknown",
                f"{corpus.answer_tokens:,}",
                human_size(corpus.nbytes),
                time.strftime("%Y-%m-%d", time.localtime(corpus.used)),
            )
            for corpus in listed
        ],
    )
