"""`redrafter-mlx learn`: train the drafter on the answers that were kept on this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.flag import Flag
from redrafter_mlx.cli.terminal import one_line
from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.learning.folder import LearningFolder, learning_folders
from redrafter_mlx.learning.kept_texts import TextStore
from redrafter_mlx.learning.versions import LearningRun, history, in_use, undo
from redrafter_mlx.runtime.paths import human_size
from redrafter_mlx.runtime.words import count


@opt.with_options
def command(
    *,
    status: Annotated[
        bool, Flag("Print what is kept, and what was learned; of all models, if none is named.")
    ] = False,
    undo: Annotated[
        bool, Flag("Use the drafter again from which the one in use was trained.")
    ] = False,
    forget: Annotated[
        bool,
        Flag(
            "Remove the kept answers and the drafters that learned from them; of all models, if "
            "none is named."
        ),
    ] = False,
    target: Annotated[opt.TargetOptions, ("model",)],
) -> None:
    """Show, undo or forget what was kept by `chat --learn` and `serve --learn`."""
    chosen = [name for name, given in (("--status", status), ("--undo", undo),
                                       ("--forget", forget)) if given]  # fmt: skip
    if len(chosen) != 1:
        raise BadInputError(f"give one of --status, --undo and --forget, not {len(chosen)} of them")
    folders = _folders_of(target.model)
    if undo:
        _undo(folders)
    elif forget:
        _forget(folders)
    else:
        _print_status(folders)


def _folders_of(model: str | None) -> list[LearningFolder]:
    """Return what is kept for a model, or for all models if none is named.

    Raises BadInputError if nothing is kept for the model.
    """
    folders = learning_folders()
    if model is None:
        return folders
    found = [folder for folder in folders if folder.model == model]
    if not found and folders:
        from redrafter_mlx.drafting.installed import fingerprints_of

        paths = [LearningFolder.of(fingerprint).path for fingerprint in fingerprints_of(model)]
        found = [folder for folder in folders if folder.path in paths]
    if not found:
        kept = ", ".join(folder.model for folder in folders) or "none"
        raise BadInputError(f"no answers of {model} are kept; of other models: {kept}")
    return found


def _undo(folders: Sequence[LearningFolder]) -> None:
    if len(folders) != 1:
        kept = ", ".join(folder.model for folder in folders) or "there is none"
        raise BadInputError(f"--undo is for one model; name it: {kept}")
    (folder,) = folders
    with folder.locked():
        before = undo(folder)
    now = "the drafter that it began with" if before is None else f"version {before.name}"
    print(f"{one_line(folder.model)}: drafts with {now} again, from the next start on")


def _forget(folders: Sequence[LearningFolder]) -> None:
    for folder in folders:
        what = f"what is kept for {one_line(folder.model)} ({human_size(folder.nbytes)})"
        if sys.stdin.isatty() and sys.stderr.isatty():
            typer.confirm(f"remove {what}, answers and learned drafters?", abort=True, err=True)
        folder.forget()
        print(f"removed {what}")
    if not folders:
        print("nothing is kept")


def _print_status(folders: Sequence[LearningFolder]) -> None:
    if not folders:
        print("nothing is kept; `redrafter-mlx chat --learn` keeps answers to learn from")
    for folder in folders:
        store = TextStore(folder.texts)
        times = [text.time for text in store.texts()]
        try:
            current = in_use(folder)
        except DamagedFileError as error:
            print(f"passed over: {error}", file=sys.stderr)
            current = None
        learned_up_to = 0.0 if current is None else current.newest
        new = sum(time > learned_up_to for time in times)
        used = "none yet" if current is None else f"version {current.name}"
        print(one_line(folder.model))
        print(f"  answers kept     {len(times)} ({human_size(store.nbytes)}), {new} of them new")
        print(f"  learned drafter  {used}")
        for run in history(folder):
            print(f"  {describe_run(run)}")
        print(f"  folder           {folder.path} ({human_size(folder.nbytes)})")


def describe_run(run: LearningRun) -> str:
    """Describe a run in one line: when it was, of how much, and what it brought."""
    parts = [
        time.strftime("%Y-%m-%d %H:%M", time.localtime(run.time)),
        f"{count(run.answers, 'answer')}, {count(run.steps, 'step')}",
        f"yours {_change(run.own)}",
    ]
    parts += [] if run.general is None else [f"general {_change(run.general)}"]
    kept = "the drafter stays" if run.version is None else f"version {run.version}"
    return "; ".join([*parts, kept])


def _change(pair: tuple[float, float]) -> str:
    """Return tokens/step before and after as text."""
    before, after = pair
    return f"{before:.2f} -> {after:.2f} tokens/step ({after / before - 1:+.1%})"
