"""Checks before a run, for errors that would otherwise cost hours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from redrafter_mlx.distill.corpus.reader import Reader
from redrafter_mlx.distill.corpus.shards import HELD_OUT_EVERY
from redrafter_mlx.distill.corpus.writing.writer import Writer
from redrafter_mlx.distill.hours import HOURS
from redrafter_mlx.distill.options_file import OPTIONS
from redrafter_mlx.distill.report.card import CARD
from redrafter_mlx.distill.report.metrics import METRICS
from redrafter_mlx.distill.report.plots import ACCURACY, LOSS
from redrafter_mlx.distill.training.checkpoint import CHECKPOINT
from redrafter_mlx.drafting.files.recognition import CONFIG
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files.atomic_write import remove_abandoned
from redrafter_mlx.runtime.files.paths import check_writable, existing_part
from redrafter_mlx.runtime.words import count
from redrafter_mlx.weights.files.names import WEIGHTS


def check_output(folder: Path) -> None:
    """Check that a run can write into a folder, which need not exist and is not created.

    Raises BadInputError if it cannot, or if it would overwrite files that no run wrote.
    """
    if folder.is_symlink() and not folder.exists():
        raise BadInputError(
            f"--output is {folder}, a link to {folder.readlink()}, which is not there"
        )
    there = existing_part(folder.absolute())
    if not there.is_dir():
        raise BadInputError(f"--output is {folder}, and {there} is a file; give a folder")
    check_writable(folder, "--output")
    if not any((folder / name).exists() for name in (CHECKPOINT, METRICS)):
        for name in (CONFIG, WEIGHTS, CARD, OPTIONS):
            if (folder / name).exists():
                raise BadInputError(
                    f"--output is {folder}, which holds a {name} that no training run wrote; "
                    f"give another folder"
                )


def remove_leftovers(folder: Path) -> None:
    """Remove the half-written files that killed runs left in a drafter's folder.

    The trainer removes its own, of the checkpoint.
    """
    for name in (CONFIG, WEIGHTS, CARD, OPTIONS, HOURS, LOSS, ACCURACY):
        remove_abandoned(folder.glob(f".*.{name}"))


def min_blocks(source: Writer | Reader, files: Sequence[Path]) -> int:
    """Return the number of blocks needed to hold some out and to train on others.

    files: the files of the given prompts or answers
    Raises BadInputError, naming the files, if no number of blocks is enough.
    """
    tried = 2 * HELD_OUT_EVERY if source.blocks is None else source.blocks
    held_out = [source.held_out(block) for block in range(tried)]
    if True in held_out and False in held_out:
        return max(held_out.index(True), held_out.index(False)) + 1
    if isinstance(source, Reader):
        held = count(len(source.conversations), "conversation")
        remedy = f"give more than {source.batch}"
    else:
        held = count(len(source.prompts), "prompt")
        remedy = "give more" + ("" if source.raw else ", or let the target write some (own_share)")
    raise BadInputError(
        f"{', '.join(map(str, files))} holds {held}, too few to hold some out and to train on "
        f"others; {remedy}"
    )
