"""The corpora on this machine: what they take, and how one is removed.

Nothing is computed here, so that listing them imports no MLX.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.runtime.files.atomic_write import locked
from redrafter_mlx.runtime.files.paths import bytes_below, cache_dir
from redrafter_mlx.weights.files.folder import read_safetensors_header

_FORMAT = "redrafter-mlx corpus "
"""Beginning of the format that a block's metadata name, whatever its version."""

_BLOCK = re.compile(r"block-\d{6}\.safetensors")
_PARTIAL = re.compile(r"\.\d+-\d+\.block-\d{6}\.safetensors")
_FINDER = ".DS_Store"  # file that macOS leaves in each folder that was looked at

_BESIDE = re.compile(r"prompts|read-[0-9a-f]{16}|(?:states|whole)(?:-\d+)*")
"""Names of a corpus's files, whole or being written, and of its folders; see extras.py."""


@dataclass(frozen=True)
class StoredCorpus:
    """A corpus in our cache."""

    key: str  # name of its folder
    path: Path
    model: str | None  # the target's name in the run that wrote it; None without a readable block
    texts: int  # of the blocks that can be read
    answer_tokens: int
    nbytes: int  # of all files
    used: float  # when it was last written to, in seconds since 1970


def corpora_folder() -> Path:
    """Return the folder of all corpora, which may not exist."""
    return cache_dir() / "corpora"


def list_corpora() -> list[StoredCorpus]:
    """Return the corpora in our cache, the largest first; other folders are left out."""
    parent = corpora_folder()
    folders = [*parent.iterdir()] if parent.is_dir() else []
    real = [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]
    found = [_stored(folder) for folder in real if any(map(_metadata, _blocks(folder)))]
    return sorted(found, key=lambda corpus: corpus.nbytes, reverse=True)


def find_corpus(key: str) -> StoredCorpus:
    """Return a corpus by its key or the beginning of it; raises BadInputError for no or several."""
    listed = list_corpora()
    found = [corpus for corpus in listed if key and corpus.key.startswith(key)]
    if len(found) != 1:
        those = ", ".join(corpus.key for corpus in found or listed) or "none"
        what = f"{len(found)} corpora begin" if found else "no corpus begins"
        raise BadInputError(f"{what} with {key!r:.40}; there are: {those}")
    return found[0]


def remove_corpus(corpus: StoredCorpus) -> None:
    """Remove a corpus, and nothing else.

    Raises BadInputError, before anything is removed, if a run uses it, if it is another user's, or
    if its folder holds anything that is not a corpus's.
    """
    path = corpus.path
    if path.lstat().st_uid != os.getuid():
        raise BadInputError(f"{path} belongs to another user; nothing was removed")
    with locked(path, f"{path} is used by a run; nothing was removed"):
        files, folders = _contents(path)
        for file in files:
            file.unlink(missing_ok=True)
        for folder in [*folders, path]:
            folder.rmdir()


def _contents(corpus: Path) -> tuple[list[Path], list[Path]]:
    """Return all files of a corpus and its folders, the inner ones first; errors as above."""
    files, folders = list[Path](), list[Path]()
    for root, inner, names in os.walk(corpus, topdown=False):
        above = Path(root)
        files += [above / name for name in names]
        folders += [above / name for name in inner]
    for file in files:
        named = _BLOCK.fullmatch(file.name) or _PARTIAL.fullmatch(file.name)
        if not (named or file.name == _FINDER) or file.is_symlink():
            raise BadInputError(f"{file} is not of a corpus; nothing was removed")
    for folder in folders:
        if not _BESIDE.fullmatch(folder.name) or folder.is_symlink():
            raise BadInputError(f"{folder} is not of a corpus; nothing was removed")
    return files, folders


def _stored(folder: Path) -> StoredCorpus:
    held = [found for block in _blocks(folder) if (found := _metadata(block))]
    model = next((found["model"] for found in held if "model" in found), None)
    written = [block.stat().st_mtime for block in _blocks(folder)]
    return StoredCorpus(
        folder.name,
        folder,
        model,
        sum(_whole(found.get("texts")) for found in held),
        sum(_whole(found.get("answer_tokens")) for found in held),
        bytes_below(folder),
        max(written, default=0.0),
    )


def _blocks(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _BLOCK.fullmatch(path.name))


def _metadata(block: Path) -> dict[str, str]:
    """Return the metadata of a block of ours; empty for any other or damaged file."""
    with suppress(DamagedFileError):
        metadata = read_safetensors_header(block).metadata
        if metadata.get("format", "").startswith(_FORMAT):
            return metadata
    return {}


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
