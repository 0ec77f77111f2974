"""The drafters available for a model: on this machine, and published."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from redrafter_mlx.drafting.files.recognition import form_in, read_drafter_config
from redrafter_mlx.drafting.recurrent_config import read_config
from redrafter_mlx.errors import DamagedFileError, ModelNotFoundError, RedrafterError
from redrafter_mlx.learning.folder import LearningFolder
from redrafter_mlx.learning.versions import in_use
from redrafter_mlx.runtime.files.paths import bytes_below, cache_dir
from redrafter_mlx.runtime.files.regular_file import read_regular_text
from redrafter_mlx.weights import SHIPPED_DRAFTERS, Progress, no_progress
from redrafter_mlx.weights.fetching.checksum import known_sha256
from redrafter_mlx.weights.fetching.resolve import find_local
from redrafter_mlx.weights.files.folder import folder_fingerprint, read_headers
from redrafter_mlx.weights.files.names import WEIGHTS
from redrafter_mlx.weights.gguf.fingerprint import gguf_fingerprint
from redrafter_mlx.weights.gguf.header import read_header
from redrafter_mlx.weights.known_drafters import hub_name, known_drafters
from redrafter_mlx.weights.registry import REGISTRY


def own_shelf() -> Path:
    """Return the folder of the user's own drafters, each a folder in it."""
    return cache_dir() / "drafters"


def drafter_folder(model: str) -> Path:
    """Return the default folder for a drafter trained for a model, named like the model."""
    name = hub_name(model).rstrip("/").rsplit("/", 1)[-1]
    return own_shelf() / (re.sub(r"[^\w.-]+", "-", name).strip(".-") or "model")


@dataclass(frozen=True)
class ListedDrafter:
    """A drafter as the command `drafters` lists it.

    name:    the value for `--drafter`
    form:    such as "EAGLE-3"
    licence: None if unknown
    size:    bytes on disk, or of the download if it is not on this machine; None if unknown
    path:    None if it is not on this machine
    """

    name: str
    form: str
    licence: str | None
    size: int | None
    path: Path | None


def list_drafters(model: str, progress: Progress = no_progress) -> list[ListedDrafter]:
    """List the drafters of a model, in the order of preference of "auto"; uses no network.

    Raises ModelNotFoundError for a name that no model can have, and DamagedFileError.
    """
    own = find_drafters(*fingerprints_of(model, progress))[0]
    listed = [
        ListedDrafter(str(folder), _form(folder), _licence(folder), bytes_below(folder), folder)
        for folder in own
    ]
    for known in known_drafters(model):
        found = find_local(known.name)
        path = None if found is None else found.path
        size = known.size if path is None else bytes_below(path, follow_links=True)
        listed.append(ListedDrafter(known.name, known.form, known.licence, size, path))
    return listed


def fingerprints_of(model: str, progress: Progress = no_progress) -> list[str]:
    """Return the fingerprints of a model's files, see TargetSource; none if they are not here."""
    entry = REGISTRY.get(model)
    if entry is not None and entry.pinned is not None:
        return [f"sha256:{entry.pinned.sha256}"]
    local = find_local(model, progress=progress)
    if local is None:
        return []
    if local.path.is_file():
        whole = known_sha256(local.path)
        earlier = [] if whole is None else [f"sha256:{whole}"]
        return [gguf_fingerprint(read_header(local.path)), *earlier]
    return [folder_fingerprint(local.path, read_headers(local.path))]


def find_drafters(*fingerprints: str | None) -> tuple[list[Path], list[RedrafterError]]:
    """Return the folders of drafters for the target with these fingerprints, the preferred first.

    The user's own, in `drafters/` of our cache, and the learned one that is in use come before
    those shipped with the code in `weights/drafters/`. Within each of the two, the most recently
    written weights come first; a learned drafter is as new as the choice of it.

    Returns:
      the folders, and the errors of folders that could not be read
    """
    found: list[Path] = []
    broken: list[RedrafterError] = []
    known = {fingerprint for fingerprint in fingerprints if fingerprint is not None}
    learned = _learned(known, broken)
    own, shipped = (_inside(shelf, broken) for shelf in (own_shelf(), SHIPPED_DRAFTERS))
    for folders in ([*own, *learned], shipped):
        here = []
        for folder in folders:
            try:
                if _trained_for(folder) in known:
                    here.append((learned.get(folder) or _written(folder), folder))
            except ModelNotFoundError:
                continue  # not a drafter
            except RedrafterError as error:
                broken.append(error)
        found += [folder for _, folder in sorted(here, reverse=True)]
    return found, broken


def _learned(fingerprints: set[str], broken: list[RedrafterError]) -> dict[Path, float]:
    """Return the learned drafters in use, each with the time when it was chosen."""
    found = {}
    for folder in map(LearningFolder.of, fingerprints):
        try:
            if version := in_use(folder):
                found[version.folder] = folder.current.stat().st_mtime
        except DamagedFileError as error:
            broken.append(error)
        except FileNotFoundError:
            continue  # it is undone just now
    return found


def _trained_for(folder: Path) -> object:
    """Return the fingerprint of a drafter's target, None if its files name none."""
    config = read_drafter_config(folder)
    if "exit_dim" in config:
        return read_config(folder).target_fingerprint
    return config.get("target_fingerprint")


def _form(folder: Path) -> str:
    try:
        return form_in(folder)
    except RedrafterError:
        return "damaged"


def _licence(folder: Path) -> str | None:
    """Return the licence on a drafter's model card, None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        card = read_regular_text(folder / "README.md")
        found = re.search(r'^license: "?([\w.-]+)"?$', card, re.MULTILINE)
        return found[1] if found else None
    return None


def _inside(shelf: Path, broken: list[RedrafterError]) -> list[Path]:
    try:
        return sorted(shelf.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        broken.append(DamagedFileError(f"{shelf} cannot be read: {error.strerror or error}"))
        return []


def _written(folder: Path) -> float:
    """Return the time when a drafter's weights were written, in seconds since 1970."""
    path = folder / WEIGHTS
    try:
        return path.stat().st_mtime
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error.strerror or error}") from error
