"""Find or fetch only those files of a model that hold some of its tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from huggingface_hub import constants

from redrafter_mlx.errors import DamagedFileError, DownloadError, ModelNotFoundError
from redrafter_mlx.weights import Progress, log_progress
from redrafter_mlx.weights.fetching import hub
from redrafter_mlx.weights.files.names import (
    MODEL_WEIGHTS,
    Needed,
    shard_names,
    weight_files,
    weight_names,
)


def resolve_part(
    name: str, of: Needed, *, offline: bool = False, progress: Progress | None = None
) -> Path:
    """Return the folder of a model, of whose weights only the files with some tensors are needed.

    name: a folder, or a Hub repository that is fetched if these files are missing here
    Raises ModelNotFoundError if it does not exist or holds no such tensors, DownloadError.
    """
    if Path(name).is_dir():
        return Path(name)
    repo = hub.split_repo(name)
    if repo is None:
        raise ModelNotFoundError(f"no model at {name!r:.200}; give a folder or a Hub repository")
    config = hub.cached_file(*repo, "config.json")
    if config is not None and _complete(config.parent, of):
        return config.parent
    if offline or constants.HF_HUB_OFFLINE:
        why = "--offline" if offline else "HF_HUB_OFFLINE"
        raise DownloadError(f"{name} is missing here, and {why} forbids fetching it")
    return _download(hub.list_repo(*repo), of, progress or log_progress())


def _complete(folder: Path, of: Needed) -> bool:
    try:
        return bool(weight_files(folder, of))
    except (DamagedFileError, OSError):
        return False


def _download(listing: hub.Listing, of: Needed, progress: Progress) -> Path:
    """Download the files into the Hub's cache; the revision's name moves to them at the end."""
    at_commit = replace(listing, revision=listing.commit)
    wanted = weight_names([name for name in listing.sizes if "/" not in name])
    if not wanted or "config.json" not in listing.sizes:
        raise ModelNotFoundError(f"{listing.repo} holds no config.json with {MODEL_WEIGHTS}")
    if wanted[0].endswith(".json"):
        wanted = shard_names(hub.download_file(at_commit, wanted[0], progress), of)
    if not wanted or not listing.sizes.keys() >= {*wanted}:
        raise ModelNotFoundError(f"{listing.repo} holds none of the tensors that are needed")
    missing = [n for n in wanted if hub.cached_file(listing.repo, listing.commit, n) is None]
    hub.check_room(sum(listing.sizes[name] for name in missing))
    for name in wanted:
        hub.download_file(at_commit, name, progress)
    return hub.download_file(listing, "config.json", progress).parent
