"""The drafters that are on this machine."""

from __future__ import annotations

from pathlib import Path

from redrafter_mlx.drafting.checkpoint import read_config
from redrafter_mlx.errors import DamagedFileError, ModelNotFoundError, RedrafterError
from redrafter_mlx.runtime.paths import cache_dir
from redrafter_mlx.weights import SHIPPED_DRAFTERS
from redrafter_mlx.weights.file_names import WEIGHTS


def find_drafters(fingerprint: str) -> tuple[list[Path], list[RedrafterError]]:
    """The folders of drafters for the target of that fingerprint, the one to take first.

    The user's own, in `drafters/` of our cache, come before those shipped beside the code in
    `weights/drafters/`; of several there, the one whose weights were written last comes first.

    Returns:
      the folders, and what is wrong with those that could not be looked into
    """
    found: list[Path] = []
    broken: list[RedrafterError] = []
    for shelf in (cache_dir() / "drafters", SHIPPED_DRAFTERS):
        here = []
        for folder in _inside(shelf, broken):
            try:
                if read_config(folder).target_fingerprint == fingerprint:
                    here.append((_written(folder), folder))
            except ModelNotFoundError:
                continue  # something else
            except RedrafterError as error:
                broken.append(error)
        found += [folder for _, folder in sorted(here, reverse=True)]
    return found, broken


def _inside(shelf: Path, broken: list[RedrafterError]) -> list[Path]:
    try:
        return sorted(shelf.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        broken.append(DamagedFileError(f"{shelf} cannot be read: {error.strerror or error}"))
        return []


def _written(folder: Path) -> float:
    """When a drafter's weights were written, in seconds since 1970."""
    path = folder / WEIGHTS
    try:
        return path.stat().st_mtime
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error.strerror or error}") from error
