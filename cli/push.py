"""`redrafter-mlx push`: a drafter onto the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from redrafter_mlx.cli.progress import progress_bars
from redrafter_mlx.cli.terminal import Terminal, check_text, one_line
from redrafter_mlx.version import __version__

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="The drafter's folder.", show_default=False)
]
Repo = Annotated[
    str,
    typer.Argument(
        metavar="REPO", help="The Hub repository, user/name; made if it is not there.",
        show_default=False,
    ),
]  # fmt: skip
Private = Annotated[
    bool, typer.Option("--private", help="Make the repository private, if it is made.")
]
Message = Annotated[
    str | None,
    typer.Option(
        "--message", metavar="TEXT", show_default=False,
        help="The commit's message. [default: what the drafter is for]",
    ),
]  # fmt: skip


def command(folder: Folder, repo: Repo, private: Private = False, message: Message = None) -> None:
    """Upload a drafter to the Hugging Face Hub; prints its address there.

    The configuration, the weights, the model card, and the training's curves and log go up in one
    commit; checkpoints stay here. Log in with `hf auth login` first.
    """
    check_text("DIR", str(folder))
    with progress_bars(f"uploading to {repo}"):
        from redrafter_mlx.drafting.checkpoint import read_config
        from redrafter_mlx.weights.publish import publish

        target = read_config(folder).target
        made = f"Drafter for {target or 'its target'}, by redrafter-mlx {__version__}"
        said = made if message is None else check_text("--message", message)
        published = publish(folder, check_text("REPO", repo), private=private, message=said)
    terminal = Terminal.standard()
    for note in published.notes:
        terminal.note(note)
    print(one_line(published.url))
