"""Learned drafters: folders that are written beside the earlier ones, of which one is in use."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.learning.folder import LearningFolder, private_folder
from redrafter_mlx.runtime.files.atomic_write import write_private_text
from redrafter_mlx.runtime.files.json_file import read_object, to_json

RECORD = "learned.json"
_VERSION = re.compile(r"\d{4,}")
_MAX_VERSIONS = 8
"""Number of versions that are kept; the oldest that are not in use are removed first."""


@dataclass(frozen=True)
class LearnedVersion:
    """A learned drafter.

    name:  of its folder: "0003"
    start: name of the version that it was trained from; None for any other drafter
    newest: time of the newest text that it has learned from, in seconds since 1970
    """

    name: str
    folder: Path
    start: str | None
    newest: float


@dataclass(frozen=True)
class LearningRun:
    """What a run of `learn` has done, and how it was judged; tokens/step are without a clock.

    time:     when it ended, in seconds since 1970
    answers:  number of answers of the user that were kept then
    steps, seconds: of training
    own, general: tokens/step before and after, on held-out answers and on general texts; None
              without any
    version:  the drafter that it brought into use; None if the earlier one stays
    """

    time: float
    answers: int
    steps: int
    seconds: float
    own: tuple[float, float]
    general: tuple[float, float] | None = None
    version: str | None = None
    seed: int = field(default=0)


def in_use(folder: LearningFolder) -> LearnedVersion | None:
    """Return the learned drafter in use; None if there is none.

    Raises DamagedFileError if the one that is named is gone or has no record.
    """
    try:
        name = folder.current.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"{folder.current} cannot be read: {error}") from error
    if not _VERSION.fullmatch(name):
        raise DamagedFileError(f"{folder.current} names no learned drafter: {name!r:.40}")
    return _read(folder, name)


def versions(folder: LearningFolder) -> list[LearnedVersion]:
    """Return all learned drafters that can be read, the oldest first."""
    found = []
    for name in sorted(_names(folder), key=int):
        with contextlib.suppress(DamagedFileError):
            found.append(_read(folder, name))
    return found


def add_version(
    folder: LearningFolder, write: Callable[[Path], None], start: str | None, newest: float
) -> LearnedVersion:
    """Write a drafter as a new version, which is not in use yet.

    write: writes the drafter's files into a folder
    """
    private_folder(folder.drafters)
    partial = folder.drafters / f".new-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700)
    try:
        write(partial)
        write_private_text(partial / RECORD, to_json({"start": start, "newest": newest}) + "\n")
        name = f"{max([0, *map(int, _names(folder))]) + 1:04d}"
        partial.rename(folder.drafters / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return _read(folder, name)


def bring_into_use(folder: LearningFolder, version: LearnedVersion | None) -> None:
    """Use a learned drafter from the next load on, or with None the one that it began with."""
    if version is None:
        folder.current.unlink(missing_ok=True)
        return
    write_private_text(folder.current, version.name + "\n")
    latest_first = sorted(_names(folder), key=int, reverse=True)
    for name in [*dict.fromkeys([version.name, version.start, *latest_first])][_MAX_VERSIONS:]:
        if name is not None:
            shutil.rmtree(folder.drafters / name, ignore_errors=True)


def undo(folder: LearningFolder) -> LearnedVersion | None:
    """Go back to what the drafter in use was trained from, and return that; None is no version.

    Raises BadInputError if no learned drafter is in use.
    """
    now = in_use(folder)
    if now is None:
        raise BadInputError(f"no learned drafter of {folder.model} is in use; nothing to undo")
    before = None
    if now.start is not None and now.start in _names(folder):
        before = _read(folder, now.start)
    bring_into_use(folder, before)
    return before


def record_run(folder: LearningFolder, run: LearningRun) -> None:
    """Add a run to the history."""
    with open(folder.history, "a", encoding="utf-8", opener=_private) as file:
        file.write(f"\n{to_json(asdict(run))}")  # in a line of its own, even after a torn one


def history(folder: LearningFolder) -> list[LearningRun]:
    """Return all runs, the oldest first; lines that cannot be read are left out."""
    try:
        lines = folder.history.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            held: dict[str, Any] = json.loads(line)
            held = {f.name: held[f.name] for f in fields(LearningRun)}
            for name in ("own", "general"):
                if held[name] is not None:
                    before, after = map(float, held[name])
                    held[name] = before, after
            found.append(LearningRun(**held))
    return found


def _read(folder: LearningFolder, name: str) -> LearnedVersion:
    path = folder.drafters / name
    try:
        record: dict[str, Any] = read_object(path / RECORD)
        start, newest = record["start"], float(record["newest"])
    except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"{path} is no learned drafter: {error}") from error
    return LearnedVersion(name, path, start if isinstance(start, str) else None, newest)


def _names(folder: LearningFolder) -> list[str]:
    if not folder.drafters.is_dir():
        return []
    return [path.name for path in folder.drafters.iterdir() if _VERSION.fullmatch(path.name)]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
