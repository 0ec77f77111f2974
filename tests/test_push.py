"""A drafter onto the Hub: what goes up, in one commit, and every way to be refused in one line.

The Hub is a small server on this machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_upload import TOKEN, FakeHub, FakeRepo, serving
from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from tiny import random_drafter

from redrafter_mlx.cli import main
from redrafter_mlx.drafting.checkpoint import save_drafter
from redrafter_mlx.version import __version__
from redrafter_mlx.weights import publish as publishing
from redrafter_mlx.weights.publish import FILES, UploadError, publish

CARD = '---\nlicense: "apache-2.0"\ntags:\n- "redrafter"\n---\n\n# A drafter\n'
REPO = "me/my-drafter"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hub, and this user logged in to it; large files go by LFS, in this process."""
    disable_progress_bars()  # as the console script does
    with serving() as server:
        _use(server.url, monkeypatch)
        yield server
    enable_progress_bars()


def _use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "drafter"
    save_drafter(random_drafter(target="tiny-llama"), folder)
    (folder / "README.md").write_text(CARD)
    (folder / "loss.png").write_bytes(b"\x89PNG loss")
    (folder / "accuracy.png").write_bytes(b"\x89PNG accuracy")
    (folder / "metrics.jsonl").write_text('{"event": "step"}\n')
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A drafter's folder as training leaves it, the unfinished and the private beside it."""
    folder = tmp_path / "drafter"
    shutil.copytree(made, folder)
    (folder / "checkpoint.safetensors").write_bytes(b"state")
    (folder / "model.safetensors.bak").write_bytes(b"old")
    (folder / ".env").write_text("SECRET=1")
    (folder / "more").mkdir()
    (folder / "more" / "config.json").write_text("{}")
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that `push` with these arguments fails with."""
    assert main.run(["push", *map(str, arguments)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err.strip()


def contents(folder: Path, repo: FakeRepo) -> dict[str, bool]:
    """For each file of a repository, whether it is that of the folder."""
    same = {}
    for name, content in repo.files.items():
        own = (folder / name).read_bytes()
        is_hash = isinstance(content, str)
        same[name] = content == (hashlib.sha256(own).hexdigest() if is_hash else own)
    return same


# What goes up


def test_drafters_files_go_up_in_one_commit_and_nothing_else(
    hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["push", str(folder), REPO]) == 0
    out, err = capsys.readouterr()
    assert out == f"{hub.url}/{REPO}\n"
    assert err == ""
    repo = hub.repos[REPO]
    assert contents(folder, repo) == dict.fromkeys(FILES, True)
    assert repo.messages == [f"Drafter for tiny-llama, by redrafter-mlx {__version__}"]
    assert not repo.private
    large = [(folder / name).read_bytes() for name in FILES if name.endswith(("rs", "png"))]
    assert sorted(hub.stored.values()) == sorted(large)


def test_xet_brings_large_files_where_it_is_installed(folder: Path, tmp_path: Path) -> None:
    with serving() as server:
        done = push_by_xet(server, folder, tmp_path)
    assert done.stderr == b""
    assert done.stdout.decode() == f"{server.url}/{REPO}\n"
    assert contents(folder, server.repos[REPO]) == dict.fromkeys(FILES, True)
    assert any("/xorbs/" in line for line in server.xet)
    assert server.stored == {}


def test_xet_that_breaks_off_is_one_line_and_commits_nothing(folder: Path, tmp_path: Path) -> None:
    with serving() as server:
        server.failing[r"/cas/v1/xorbs/.*"] = (400, "no")
        done = push_by_xet(server, folder, tmp_path)
    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr.startswith(f"error: {REPO} could not be uploaded".encode())
    assert done.stderr.count(b"\n") == 1
    assert server.repos[REPO].files == {}


def push_by_xet(
    server: FakeHub, folder: Path, tmp_path: Path
) -> subprocess.CompletedProcess[bytes]:
    """In a process of its own: the Xet client keeps a session and a cache for its life."""
    pytest.importorskip("hf_xet")
    own = {
        "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": TOKEN, "HF_ENDPOINT": server.url,
    }  # fmt: skip
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-m", "redrafter_mlx.cli.main", "push", str(folder), REPO],
        env={**clean, **own}, capture_output=True, timeout=120, check=False,
    )  # fmt: skip


def test_message_and_private_reach_the_hub(hub: FakeHub, folder: Path) -> None:
    assert main.run(["push", str(folder), REPO, "--private", "--message", "Better ☀"]) == 0
    assert hub.repos[REPO].private
    assert hub.repos[REPO].messages == ["Better ☀"]


def test_second_push_replaces_the_files_of_the_first(hub: FakeHub, folder: Path) -> None:
    assert main.run(["push", str(folder), REPO]) == 0
    save_drafter(random_drafter(seed=1, target="tiny-llama"), folder)
    assert main.run(["push", str(folder), REPO]) == 0
    assert contents(folder, hub.repos[REPO]) == dict.fromkeys(FILES, True)
    assert len(hub.repos[REPO].messages) == 2


def test_what_the_hub_has_stored_is_not_sent_again(hub: FakeHub, folder: Path) -> None:
    publish(folder, REPO, private=False, message="first")
    hub.asked.clear()
    publish(folder, REPO, private=False, message="second")
    assert not any(line.startswith("PUT") for line in hub.asked)
    assert hub.repos[REPO].messages == ["first", "second"]


def test_drafter_without_a_card_goes_up_with_a_note(
    hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in FILES[2:]:
        (folder / name).unlink()
    assert main.run(["push", str(folder), REPO]) == 0
    assert sorted(hub.repos[REPO].files) == ["config.json", "model.safetensors"]
    out, err = capsys.readouterr()
    assert out == f"{hub.url}/{REPO}\n"
    assert err.count("\n") == 1
    assert "has no model card" in err


def test_what_the_hub_says_of_a_card_is_one_note(
    hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "README.md").write_text("# No front matter\n")
    assert main.run(["push", str(folder), REPO]) == 0
    err = capsys.readouterr().err
    assert "empty or missing yaml metadata" in err
    assert err.count("\n") == 1
    assert "README.md" in hub.repos[REPO].files


# Refused before anything is sent


@pytest.mark.parametrize("repo", ["name", "me/", "/name", "a/b/c", "me/na me", "me/--x", "me/a.git",
                                  "", "me/ünï", "https://huggingface.co/me/x"])  # fmt: skip
def test_malformed_repository_is_refused(
    hub: FakeHub, folder: Path, repo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "give user/name" in refused(capsys, folder, repo)
    assert hub.asked == []


def test_folder_that_is_not_there_is_refused(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no drafter at" in refused(capsys, tmp_path / "nowhere", REPO)
    assert hub.asked == []


def test_folder_without_a_drafter_is_refused(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "config.json is missing" in refused(capsys, tmp_path, REPO)
    assert hub.asked == []


def test_folder_of_another_model_is_refused(
    hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    assert "config.json" in refused(capsys, folder, REPO)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [("missing", "is missing"), ("cut", "is truncated"), ("head", "truncated in its header"),
     ("other", "safetensors"), ("empty", "holds no tensors")],
)  # fmt: skip
def test_damaged_weights_are_refused(
    hub: FakeHub, folder: Path, damage: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    damaged = {
        "cut": whole[:-1],
        "head": whole[:20],
        "other": b"\x08" + bytes(7) + b"not JSON",
        "empty": b"\x02" + bytes(7) + b"{}",
    }
    path.unlink()
    if damage != "missing":
        path.write_bytes(damaged[damage])
    said = refused(capsys, folder, REPO)
    assert "model.safetensors" in said
    assert words in said
    assert hub.asked == []


def test_empty_message_is_refused(
    hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "message is empty" in refused(capsys, folder, REPO, "--message", " ")
    assert hub.asked == []


def test_without_a_login_it_says_how_to_log_in(
    hub: FakeHub,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    said = refused(capsys, folder, REPO)
    assert "not logged in" in said
    assert said.endswith("hf auth login")
    assert hub.asked == []
    (tmp_path / "no-token").write_text(TOKEN)
    assert main.run(["push", str(folder), REPO]) == 0  # and that is where the login is looked for


def test_hub_switched_off_is_not_asked(
    hub: FakeHub,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused(capsys, folder, REPO)
    assert hub.asked == []


# Refused by the Hub


@pytest.mark.parametrize("there", [False, True])
def test_login_that_the_hub_does_not_know_is_refused(
    hub: FakeHub,
    folder: Path,
    there: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    if there:
        hub.repos[REPO] = FakeRepo(private=False)
    said = refused(capsys, folder, REPO)
    assert said.endswith("hf auth login")
    assert "hf_expired" not in said


def test_another_users_name_is_refused(
    hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, folder, "someone/new")
    assert "someone/new" in said
    assert "rights" in said, "the Hub's own reason"
    assert hub.repos == {}


def test_another_users_repository_is_refused(
    hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repos["someone/old"] = FakeRepo(private=False, files={"config.json": b"theirs"})
    assert "someone/old" in refused(capsys, folder, "someone/old")
    assert hub.repos["someone/old"].files == {"config.json": b"theirs"}


def test_private_does_not_publish_into_a_public_repository(
    hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repos[REPO] = FakeRepo(private=False)
    said = refused(capsys, folder, REPO, "--private")
    assert REPO in said
    assert "public" in said
    assert hub.repos[REPO].files == {}
    hub.repos[REPO].private = True
    assert main.run(["push", str(folder), REPO, "--private"]) == 0


def test_card_that_the_hub_refuses_is_said(
    hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "README.md").write_text("---\nlicense: [\n---\n")
    said = refused(capsys, folder, REPO)
    assert "README.md" in said
    assert '"license" must be one of' in said
    assert hub.repos[REPO].files == {}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (r"/api/models/me/my-drafter", 503),
        (r"/api/repos/create", 500),
        (r"/api/models/.*/preupload/main", 500),
        (r"/me/my-drafter.git/info/lfs/objects/batch", 413),
        (r"/storage/[0-9a-f]{64}", 503),
        (r"/storage/verify", 400),
        (r"/api/models/.*/commit/main", 500),
    ],
)
def test_upload_that_breaks_off_is_one_line_and_commits_nothing(
    hub: FakeHub,
    folder: Path,
    path: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # huggingface-hub's, between its tries
    hub.failing[path] = (status, "the storage\nis on fire")
    said = refused(capsys, folder, REPO)
    assert REPO in said
    assert f"{status} the storage is on fire" in said
    assert REPO not in hub.repos or hub.repos[REPO].files == {}
    hub.failing.clear()
    assert main.run(["push", str(folder), REPO]) == 0
    assert contents(folder, hub.repos[REPO]) == dict.fromkeys(FILES, True)


def test_no_network_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        _use(f"http://127.0.0.1:{probe.getsockname()[1]}", monkeypatch)
    start = time.monotonic()
    said = refused(capsys, folder, REPO)
    assert f"{REPO} could not be uploaded" in said
    assert "refused" in said
    assert time.monotonic() - start < 10


def test_hub_that_never_answers_is_given_up_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "ANSWER_TIMEOUT", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        _use(f"http://127.0.0.1:{silent.getsockname()[1]}", monkeypatch)
        start = time.monotonic()
        with pytest.raises(UploadError, match="could not be uploaded"):
            publish(folder, REPO, private=False, message="x")
        assert time.monotonic() - start < 10
