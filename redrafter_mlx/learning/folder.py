"""The folder of one model: which of its files hold what, and that nobody else can read them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.runtime.files.atomic_write import locked, write_private_text
from redrafter_mlx.runtime.files.json_file import read_object, to_json
from redrafter_mlx.runtime.files.paths import bytes_below, cache_dir

ABOUT = "about.json"


@dataclass(frozen=True)
class LearningFolder:
    """What is kept for the model of one fingerprint; nothing need exist yet."""

    path: Path

    @classmethod
    def of(cls, fingerprint: str) -> LearningFolder:
        key = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
        return cls(learning_dir() / key)

    @property
    def texts(self) -> Path:
        return self.path / "texts"

    @property
    def general(self) -> Path:
        return self.path / "general"

    @property
    def drafters(self) -> Path:
        return self.path / "drafters"

    @property
    def work(self) -> Path:
        """Of a run that is learning; it is removed at its end, and before the next one."""
        return self.path / "work"

    @property
    def current(self) -> Path:
        """The file that names the learned drafter in use; without it, none is in use."""
        return self.path / "current"

    @property
    def history(self) -> Path:
        return self.path / "history.jsonl"

    @property
    def model(self) -> str:
        """The model's name when it was first used here; its key if the record is gone."""
        with contextlib.suppress(OSError, DamagedFileError):
            return str(read_object(self.path / ABOUT)["model"])
        return self.path.name

    @property
    def nbytes(self) -> int:
        return bytes_below(self.path)

    def create(self, model: str, fingerprint: str) -> bool:
        """Create the folder, for its owner alone; return whether it is new.

        Raises BadInputError if it cannot be, or if it belongs to another user.
        """
        try:
            private_folder(self.path.parent)
            private_folder(self.path)
            if new := not (self.path / ABOUT).exists():
                about = {"model": model, "fingerprint": fingerprint}
                write_private_text(self.path / ABOUT, to_json(about) + "\n")
        except OSError as error:
            raise BadInputError(f"{self.path} cannot keep answers: {error.strerror}") from None
        return new

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from learning for this model, or from forgetting meanwhile.

        Raises BadInputError if one does already.
        """
        with locked(self.path, f"another process learns in {self.path}; wait for it"):
            yield

    def forget(self) -> None:
        """Remove everything, the learned drafters too; raises BadInputError while one learns."""
        if not self.path.exists():
            return
        with self.locked():
            self.current.unlink(missing_ok=True)  # first: no drafter is half there
            shutil.rmtree(self.path)


def learning_dir() -> Path:
    """Return the folder of what all models learn from, which may not exist."""
    return cache_dir() / "learning"


def learning_folders() -> list[LearningFolder]:
    """Return the folders of all models for which answers were kept."""
    parent = learning_dir()
    if not parent.is_dir():
        return []
    return [LearningFolder(path) for path in sorted(parent.iterdir()) if (path / ABOUT).exists()]


def private_folder(path: Path) -> None:
    """Create a folder that its owner alone can read; raises BadInputError for another user's."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise BadInputError(
            f"{path} belongs to another user, who could read what you ask; set REDRAFTER_CACHE to "
            f"a folder of your own"
        )
    path.chmod(0o700)
