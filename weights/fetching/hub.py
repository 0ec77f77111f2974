"""Download files from the Hugging Face Hub into huggingface-hub's cache; parse the Hub's names.

A repository is listed first, in one request without retries. So an unreachable Hub is noticed
within seconds, and sizes are known before the download. HF_ENDPOINT, HF_HUB_CACHE, HF_TOKEN,
HF_HUB_ETAG_TIMEOUT and HF_HUB_OFFLINE have the same meaning as in huggingface-hub.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub
from huggingface_hub import constants

from redrafter_mlx.errors import DamagedFileError, DownloadError, ModelNotFoundError
from redrafter_mlx.runtime.files.json_file import read_object
from redrafter_mlx.runtime.files.paths import NoRoomError, check_free_disk
from redrafter_mlx.weights import DOWNLOADING, Progress
from redrafter_mlx.weights.files.names import MODEL_WEIGHTS, weight_files, weight_names

if TYPE_CHECKING:
    from huggingface_hub.utils.tqdm import tqdm

_SMALL_FILES = ("*.json", "tokenizer.model", "*.tiktoken", "tiktoken.model", "*.txt",
                "*.jsonl", "*.jinja")  # fmt: skip
_REPO = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
"""Name of a repository, and its optional revision."""

_UNREACHABLE = {"ConnectError", "TimeoutException", "ProxyError"}
"""Names of the HTTP client's errors without an answer; its module differs between versions."""

MAX_DRAFTER_LAYERS = 8
"""Maximum layers of a drafter: a repository of PyTorch files with more needs safetensors."""


class UnreachableError(DownloadError):
    """The Hub cannot be reached at all."""


@dataclass(frozen=True)
class Listing:
    """Files of a repository at a revision: its commit, and sizes in bytes by file name."""

    repo: str
    revision: str
    commit: str
    sizes: dict[str, int]
    licence: str | None = None  # as its card names it, None if the card does not

    @property
    def weight_bytes(self) -> int:
        """Size of the files that hold its weights."""
        return sum(self.sizes[name] for name in weight_names(self.sizes))


def split_repo(name: str) -> tuple[str, str] | None:
    """Return the repository and revision of `org/name` or `org/name@revision`, else None."""
    found = _REPO.fullmatch(name)
    return None if found is None else (found[1], found[2] or "main")


def list_repo(repo: str, revision: str) -> Listing:
    """Ask the Hub which files a repository holds; UnreachableError or ModelNotFoundError."""
    with _explained_errors(repo, revision):
        info = huggingface_hub.HfApi(endpoint=_endpoint()).model_info(
            repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
    sizes = {f.rfilename: f.size or 0 for f in info.siblings or ()}
    card = info.card_data
    licence = None if card is None else card.get("license_name") or card.get("license")
    return Listing(repo, revision, info.sha or revision, sizes, licence)


def download_file(listing: Listing, name: str, progress: Progress, *, again: bool = False) -> Path:
    """Download one file of a listing into the Hub's cache.

    A cached file is replaced if its size differs from the listing's, and always with `again`.
    Raises DownloadError when the transfer breaks off.
    """
    size = listing.sizes[name]
    for forced in (True,) if again else (False, True):
        with _explained_errors(listing.repo, listing.revision):
            path = huggingface_hub.hf_hub_download(
                listing.repo,
                name,
                revision=listing.revision,
                endpoint=_endpoint(),
                force_download=forced,
                tqdm_class=_tqdm_reporting(progress, f"{DOWNLOADING}{name}"),
            )
        found = Path(path).stat().st_size
        if found == size:
            return Path(path)
    raise DownloadError(f"{name} came with {found} of {size} bytes")


def cached_file(repo: str, revision: str, name: str) -> Path | None:
    """Return the path of a file in the Hub's cache, without network access; None if missing."""
    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    try:  # as `try_to_load_from_cache`, whose import takes half a second
        commit = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = revision
    path = folder / "snapshots" / commit / name
    return path if path.is_file() else None


def cached_repo(repo: str, revision: str) -> Path | None:
    """Return a repository's folder in the Hub's cache if it has configuration and weights."""
    config = cached_file(repo, revision, "config.json")
    if config is None:
        return None
    try:
        whole = _are_safetensors(weight_files(config.parent)) or is_drafter_config(config)
    except (DamagedFileError, OSError):
        return None
    return config.parent if whole else None


def cached_repos() -> list[str]:
    """Return the repositories with a complete model in the Hub's cache at `main`."""
    folders = sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*"))
    # Neither part holds "--", or the Hub would not take it.
    names = ["/".join(parts[1:]) for f in folders if len(parts := f.name.split("--")) == 3]
    return [name for name in names if cached_repo(name, "main") is not None]


def download_repo(
    listing: Listing,
    progress: Progress,
    check: Callable[[Path, Mapping[str, int]], None] | None = None,
) -> Path:
    """Download a repository's configuration, tokenizer and weights into the Hub's cache.

    Weights (PyTorch files if a drafter has no safetensors) come last, and the revision's name after
    them: a folder with all its weights is complete, and an older download stays usable until then.

    check: called before the weights with config.json's path and the sizes of all files; may raise
    Raises ModelNotFoundError if it holds nothing that can be loaded, NoRoomError, DownloadError.
    """
    at_commit = replace(listing, revision=listing.commit)
    names = [name for name in listing.sizes if "/" not in name]
    weights = weight_names(names)
    small = sorted(n for n in names if any(fnmatch(n, p) for p in _SMALL_FILES))
    loads = bool(weights) and "config.json" in names
    if loads and not any(fnmatch(name, MODEL_WEIGHTS) for name in names):
        loads = is_drafter_config(download_file(at_commit, "config.json", progress))
    if not _are_safetensors(map(Path, weights)):
        small = ["config.json"]
    if not loads:
        raise ModelNotFoundError(_nothing_to_load(listing))
    wanted = [n for n in small if n not in weights] + weights
    missing = [n for n in wanted if cached_file(listing.repo, listing.commit, n) is None]
    check_room(sum(listing.sizes[n] for n in missing))
    if check is not None:
        check(download_file(at_commit, "config.json", progress), listing.sizes)
    for name in wanted:
        download_file(at_commit, name, progress)
    return download_file(listing, "config.json", progress).parent


def check_room(needed: int) -> None:
    """Raise NoRoomError unless the disk of the Hub's cache has room for `needed` bytes."""
    check_free_disk(Path(constants.HF_HUB_CACHE), needed, "HF_HUB_CACHE")


def _are_safetensors(weights: Iterable[Path]) -> bool:
    return any(path.suffix == ".safetensors" for path in weights)


def is_drafter_config(config: Path) -> bool:
    """Whether a configuration is a drafter's: of few layers, or EAGLE-3's."""
    try:
        described = read_object(config)
    except DamagedFileError:
        return True  # the later reader of the file reports the damage
    layers = described.get("num_hidden_layers", 0)
    few = isinstance(layers, int) and layers <= MAX_DRAFTER_LAYERS
    return few or "draft_vocab_size" in described


def _tqdm_reporting(progress: Progress, label: str) -> type[tqdm]:
    """Return a tqdm class for huggingface-hub that draws nothing and reports to `progress`."""
    from huggingface_hub.utils.tqdm import tqdm

    class Reporting(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})
            self.update(0)

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            progress(label, int(self.n), None if self.total is None else int(self.total))

    return Reporting


def _nothing_to_load(listing: Listing) -> str:
    gguf = next((n for n in sorted(listing.sizes) if n.endswith(".gguf")), None)
    if gguf is not None:
        return (
            f"{listing.repo} holds GGUF files and no safetensors; download one, such as {gguf}, "
            f"and give its path"
        )
    return f"{listing.repo} holds no config.json with {MODEL_WEIGHTS} at {listing.revision}"


def _endpoint() -> str | None:
    """Return the current HF_ENDPOINT; huggingface-hub reads it only when it is imported."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


@contextlib.contextmanager
def _explained_errors(repo: str, revision: str) -> Iterator[None]:
    """Raise any error inside as ModelNotFoundError or DownloadError, with one short line."""
    try:
        yield
    except Exception as error:  # the HTTP client's own classes differ between hub versions
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):  # anybody may list it, but not read its files
            raise ModelNotFoundError(
                f"{repo} is gated: accept its terms on its Hub page and log in with: hf auth login"
            ) from error
        status = getattr(getattr(error, "response", None), "status_code", None)
        if (
            status == 401 and huggingface_hub.get_token() is not None
        ):  # without a token: no such repository
            text = "your Hub token is refused: unset HF_TOKEN or run: hf auth login"
            raise DownloadError(text) from error
        if isinstance(error, errors.RevisionNotFoundError):
            raise ModelNotFoundError(f"{repo} has no revision {revision!r} on the Hub") from error
        if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
            raise ModelNotFoundError(
                f"no repository {repo!r} on the Hub (or it is private: log in with: hf auth login)"
            ) from error
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise NoRoomError("the disk is full; make room") from error
        text = " ".join(str(error).split())[:160] or type(error).__name__
        if not _UNREACHABLE.isdisjoint(kind.__name__ for kind in type(error).__mro__):
            raise UnreachableError(f"the Hub cannot be reached ({text})") from error
        raise DownloadError(text) from error
