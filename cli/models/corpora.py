"""`redrafter-mlx corpora`: the texts that training keeps on disk, and their removal."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Annotated

import typer

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.flag import Flag
from redrafter_mlx.cli.models.command import print_table
from redrafter_mlx.cli.terminal import sanitise
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files.paths import human_size


@opt.with_options
def command(
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
        if sys.stdin.isatty() and sys.stderr.isatty():
            typer.confirm(f"remove {what}?", abort=True, err=True)
        remove_corpus(corpus)
        print(f"removed {what}")
    if remove:
        return
    corpora = list_corpora()
    if as_json:
        print(json.dumps([{**asdict(corpus), "path": str(corpus.path)} for corpus in corpora]))
        return
    if not corpora:
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
            for corpus in corpora
        ],
    )
