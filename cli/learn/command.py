"""`redrafter-mlx learn`: train the drafter on the answers that were kept on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, cast

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.flag import Flag
from redrafter_mlx.cli.learn import at_night as night
from redrafter_mlx.cli.learn import show
from redrafter_mlx.cli.progress import describe_count, progress_bars
from redrafter_mlx.cli.terminal import Terminal, confirm, one_line
from redrafter_mlx.config import DType
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.learning.folder import LearningFolder, learning_folders
from redrafter_mlx.learning.versions import undo as undo_version
from redrafter_mlx.runtime.awake import kept_awake
from redrafter_mlx.runtime.files.paths import human_size


@opt.with_options
def command(
    *,
    minutes: Annotated[
        float,
        Flag("How long it reads, trains and judges; the first time, it takes a little more.", "N"),
    ] = 10.0,
    status: Annotated[
        bool, Flag("Print what is kept, and what was learned; of all models, if none is named.")
    ] = False,
    plot: Annotated[bool, Flag("Draw tokens/step over the number of answers.")] = False,
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
    at_night: Annotated[
        bool,
        Flag(
            "Print an entry for launchd or cron that learns at night, while the machine is idle "
            "and on mains power; nothing is installed."
        ),
    ] = False,
    target: opt.TargetOptions,
) -> None:
    """Train the drafter on the answers that `chat --learn` and `serve --learn` have kept.

    The result is used from the next start on, if its tokens/step rise on answers that it did not
    learn from, and fall by no more than 2% on general texts. Otherwise the drafter stays.
    """
    given = {"--status": status, "--plot": plot, "--undo": undo, "--forget": forget,
             "--at-night": at_night}  # fmt: skip
    chosen = [name for name, wanted in given.items() if wanted]
    if len(chosen) > 1:
        raise BadInputError(f"{chosen[0]} and {chosen[1]} are two things; give one of them")
    if at_night:
        text, how = night.entry(target.model, minutes)
        Terminal.standard().note(how)
        print(text)
    elif undo:
        _undo(_folders_of(target.model))
    elif forget:
        _forget(_folders_of(target.model))
    elif plot:
        print(show.plot(_one(_folders_of(target.model), "--plot")))
    elif status:
        _print_status(_folders_of(target.model))
    else:
        _learn(target, minutes)


def _learn(target: opt.TargetOptions, minutes: float) -> None:
    from redrafter_mlx.distill.learn.run import LearnOptions, learn
    from redrafter_mlx.loading.target import load_target
    from redrafter_mlx.weights.registry import DEFAULT_MODEL

    options = LearnOptions(minutes)
    name = target.model or DEFAULT_MODEL
    with progress_bars(f"loading {name}") as progress:
        loaded = load_target(
            name,
            dtype=cast(DType, target.dtype),
            quantize=target.quantize,
            offline=target.offline,
            progress=progress,
        )
    activity = f"learning for {minutes:g} minutes"
    with kept_awake(), progress_bars(activity, describe_count) as progress:
        run = learn(loaded, options, progress)
    if run is None:
        print(f"{one_line(name)}: no answer was kept since the drafter learned")
        return
    for line in show.describe_result(run, name):
        print(line)


def _folders_of(model: str | None) -> list[LearningFolder]:
    """Return what is kept for a model, or for all without a name; BadInputError for nothing."""
    folders = learning_folders()
    if model is None:
        return folders
    found = [folder for folder in folders if folder.model == model]
    if not found and folders:
        from redrafter_mlx.drafting.files.installed import fingerprints_of

        paths = [LearningFolder.of(fingerprint).path for fingerprint in fingerprints_of(model)]
        found = [folder for folder in folders if folder.path in paths]
    if not found:
        kept = ", ".join(folder.model for folder in folders) or "none"
        raise BadInputError(f"no answers of {model} are kept; of other models: {kept}")
    return found


def _one(folders: Sequence[LearningFolder], option: str) -> LearningFolder:
    """Return the only folder; raises BadInputError if there are several or none."""
    if not folders:
        raise BadInputError("nothing is kept; `redrafter-mlx chat --learn` keeps answers")
    if len(folders) > 1:
        kept = ", ".join(folder.model for folder in folders)
        raise BadInputError(f"{option} is for one model; name it: {kept}")
    return folders[0]


def _undo(folders: Sequence[LearningFolder]) -> None:
    folder = _one(folders, "--undo")
    with folder.locked():
        before = undo_version(folder)
    now = "the drafter that it began with" if before is None else f"version {before.name}"
    print(f"{one_line(folder.model)}: {now} is used again, from the next start on")


def _forget(folders: Sequence[LearningFolder]) -> None:
    for folder in folders:
        what = f"what is kept for {one_line(folder.model)} ({human_size(folder.nbytes)})"
        confirm(f"remove {what}, answers and learned drafters?")
        folder.forget()
        print(f"removed {what}")
    if not folders:
        print("nothing is kept")


def _print_status(folders: Sequence[LearningFolder]) -> None:
    if not folders:
        print("nothing is kept; `redrafter-mlx chat --learn` keeps answers to learn from")
    for folder in folders:
        for line in show.status(folder):
            print(line)
