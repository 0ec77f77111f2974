"""Model files that their user may read but not write are fully usable."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from weights_samples import Q4_1, gguf_metadata, gguf_tensors, llama_model, write_gguf

import redrafter_mlx
from redrafter_mlx.runtime.files.paths import keep_own_kernels
from redrafter_mlx.weights.fetching.resolve import resolve
from redrafter_mlx.weights.fetching.wheel import wheel_path
from redrafter_mlx.weights.registry import DEFAULT_MODEL, REGISTRY

NOBODY = 65534
CANNOT = 77

AS_NOBODY = f"""
import os, sys, tempfile
from redrafter_mlx.loading.load import load
if os.geteuid() == 0:  # permissions do not stop root
    try:
        os.setgid({NOBODY})
        os.setuid({NOBODY})
    except OSError:
        sys.exit({CANNOT})
if not os.access(sys.prefix, os.R_OK | os.X_OK):
    sys.exit({CANNOT})
assert not os.access(sys.argv[1], os.W_OK)
with tempfile.TemporaryDirectory() as own:
    os.environ["TMPDIR"] = own  # MLX keeps compiled kernels there, and another user's may be first
    model = load(sys.argv[2], drafter=sys.argv[3])
    print(model.generate([5, 6, 7], max_tokens=3, draft=False).token_ids)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that any user can enter; pytest's folders are private."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    for part in (path, *path.rglob("*")):
        part.chmod(0o755)
    shutil.rmtree(path)


def test_a_gguf_file_that_may_not_be_written_loads_and_is_left_as_it_was(folder: Path) -> None:
    path = write_gguf(folder / "m.gguf", gguf_metadata(), gguf_tensors(llama_model(), Q4_1))
    before = path.read_bytes()
    want = redrafter_mlx.load(path, drafter=None).generate([5, 6, 7], max_tokens=3).token_ids
    path.chmod(0o444)
    folder.chmod(0o555)
    got = _as_nobody(folder, path, path, "lookup")
    assert got == str(want)
    assert path.read_bytes() == before


@pytest.mark.real_model
def test_the_default_model_loads_from_a_cache_that_may_not_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve(DEFAULT_MODEL).path
    monkeypatch.setenv("REDRAFTER_CACHE", str(folder))
    path = wheel_path(REGISTRY[DEFAULT_MODEL])
    path.parent.mkdir(parents=True)
    shutil.copyfile(source, path)
    for part in (*folder.rglob("*"), folder):
        part.chmod(0o555 if part.is_dir() else 0o444)
    got = _as_nobody(folder, path, DEFAULT_MODEL, "auto")
    assert len(ast.literal_eval(got)) == 3


def _as_nobody(cache: Path, *arguments: object) -> str:
    """Return the tokens that another user gets, with `cache` as the cache folder."""
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "REDRAFTER_CACHE": str(cache), "HOME": str(cache)},
    )
    if done.returncode == CANNOT:
        pytest.skip("no other user can be had here, or none who may read this environment")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_kernels_are_compiled_elsewhere_if_another_user_owns_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    keep_own_kernels()
    (tmp_path / "mlx").mkdir()
    keep_own_kernels()
    assert os.environ["TMPDIR"] == str(tmp_path)
    monkeypatch.setattr("os.getuid", lambda: (tmp_path / "mlx").stat().st_uid + 1)
    keep_own_kernels()
    assert Path(os.environ["TMPDIR"]) == tmp_path / "cache" / "kernels"
    assert Path(os.environ["TMPDIR"]).is_dir()
