"""Without a network, or without the Hub, each failure is one line with the command for later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from fake_hub import NAME, FakeHub, isolate
from huggingface_hub import constants
from repositories import REPO_FILES

from redrafter_mlx.errors import DownloadError, ModelNotFoundError
from redrafter_mlx.weights.fetching.resolve import pull, resolve


@pytest.mark.usefixtures("no_hub")
def test_no_network_at_all_is_one_line_with_the_command_for_later() -> None:
    with pytest.raises(DownloadError, match=r"no network.*redrafter-mlx pull smollm2-135m$") as e:
        resolve(NAME)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", [NAME, "vicuna-7b", "org/repo"])
def test_offline_is_one_line_with_the_command_for_later(hub: FakeHub, name: str) -> None:
    with pytest.raises(DownloadError, match=rf"--offline.*redrafter-mlx pull {name}$"):
        resolve(name, offline=True)
    assert hub.asked == []


def test_hub_switched_off_by_its_own_variable_is_not_asked(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        resolve("org/repo")
    assert hub.asked == []


def test_pull_without_the_hub_leaves_a_model_that_is_here_as_it_is(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/repo", "main"] = REPO_FILES
    folder = resolve("org/repo").path
    hub.asked.clear()
    assert pull("org/repo", offline=True).path == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pull("org/repo").path == folder
    assert hub.asked == []


def test_a_model_that_is_here_is_kept_when_the_hub_cannot_be_reached(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/repo", "main"] = REPO_FILES
    folder, lines = resolve("org/repo").path, list[str]()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert pull("org/repo", advise=lines.append).path == folder
    assert len(lines) == 1
    assert "org/repo" in lines[0]
    assert "not updated: the Hub cannot be reached (" in lines[0]
    with pytest.raises(DownloadError, match=r"cannot be reached \(.*redrafter-mlx pull org/other$"):
        pull("org/other")


def test_hub_that_never_answers_is_given_up_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        isolate(tmp_path, monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)  # as from the environment
        with pytest.raises(DownloadError, match="redrafter-mlx pull org/repo"):
            resolve("org/repo")
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):  # there was no second attempt
            silent.accept()


def test_a_refused_token_is_named_with_its_remedy(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refuses_tokens = True
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_expired")
    with pytest.raises(DownloadError, match="unset HF_TOKEN"):
        resolve("org/repo")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises((DownloadError, ModelNotFoundError)) as anonymous:
        resolve("org/repo")
    assert "HF_TOKEN" not in str(anonymous.value)
