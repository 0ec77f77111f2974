"""A known drafter that is not on this machine is offered before its model is loaded."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from redrafter_mlx.cli import main, options, serve
from redrafter_mlx.cli.terminal import INTERRUPTED, Terminal
from redrafter_mlx.errors import DownloadError, RedrafterError
from redrafter_mlx.weights.fetching import hub, resolve
from redrafter_mlx.weights.known_drafters import KnownDrafter

REPO = "org/tiny-drafter"
MODEL = "org/tiny-4bit"
LISTING = hub.Listing(REPO, "main", "0" * 40, {"model.safetensors": 4_000_000}, "mit")


class LoadedError(RedrafterError):
    """Ends a command where it would load its model."""


class Person:
    """Answers questions at a terminal, and records them."""

    def __init__(self) -> None:
        self.questions: list[str] = []
        self.answers: Iterator[str] = iter(())
        self.fetched: list[str] = []

    def __call__(self, question: str) -> str:
        self.questions.append(question)
        answer = next(self.answers)
        if answer == "^C":
            raise KeyboardInterrupt
        return answer

    def shown(self) -> str:
        """Return what the terminal showed, without questions."""
        stdout = Terminal.standard().stdout
        assert isinstance(stdout, io.StringIO)
        return stdout.getvalue()


@pytest.fixture
def person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Person:
    """Empty caches, a drafter known for a model, and a person at the terminal."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "ours"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    known = {"tiny": (KnownDrafter(REPO, "EAGLE-3"),)}
    monkeypatch.setattr("redrafter_mlx.weights.known_drafters.KNOWN_DRAFTERS", known)
    monkeypatch.setattr(hub, "list_repo", lambda *_: LISTING)
    made = Person()
    monkeypatch.setattr("builtins.input", made)

    def load(*_: object, **__: object) -> None:
        raise LoadedError("loaded")

    def fetch(name: str, **_: object) -> None:
        made.fetched.append(name)
        raise DownloadError("the disk is full")

    monkeypatch.setattr(options, "load_model", load)
    monkeypatch.setattr(serve, "run", load)
    monkeypatch.setattr(resolve, "pull", fetch)
    at_terminal(monkeypatch, True)
    return made


def at_terminal(monkeypatch: pytest.MonkeyPatch, interactive: bool) -> None:
    terminal = Terminal(io.StringIO(), io.StringIO(), io.StringIO(), interactive)
    monkeypatch.setattr(Terminal, "standard", lambda: terminal)


@pytest.mark.parametrize("command", ["chat", "serve"])
@pytest.mark.parametrize("answer", ["", "y", "YES "])
def test_a_drafter_that_is_known_and_not_here_is_fetched_if_the_user_agrees(
    person: Person, command: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    person.answers = iter(["what?", answer])
    assert main.run([command, MODEL]) == 1
    assert person.fetched == [REPO]
    for fact in (REPO, MODEL, "EAGLE-3", "4 MB", "mit"):
        assert fact in person.shown()
    assert "y or n" in person.questions[1]
    assert capsys.readouterr().err == "error: loaded\n", "a failed download ends no chat"


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_a_refusal_is_kept_and_the_chat_goes_on(person: Person, command: str) -> None:
    person.answers = iter(["n"])
    for _ in range(2):
        assert main.run([command, MODEL]) == 1
    assert len(person.questions) == 1
    assert person.fetched == []


def test_ctrl_c_at_the_question_ends_the_command_and_its_line(person: Person) -> None:
    person.answers = iter(["^C"])
    assert main.run(["chat", MODEL]) == INTERRUPTED
    assert person.fetched == []
    assert person.shown().endswith("\n\n")


@pytest.mark.parametrize(
    "more", [["--drafter", "lookup"], ["--offline"], ["--no-draft"], ["--server", "http://x/v1"]]
)
def test_nothing_is_asked_where_no_such_drafter_would_draft(
    person: Person, more: list[str]
) -> None:
    assert main.run(["chat", MODEL, *more]) == 1
    assert person.questions == []


def test_nothing_is_asked_without_a_terminal_or_without_the_hub(
    person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> None:
        raise hub.UnreachableError("no answer")

    monkeypatch.setattr(hub, "list_repo", unreachable)
    assert main.run(["chat", MODEL]) == 1
    monkeypatch.setattr(hub, "list_repo", lambda *_: LISTING)
    at_terminal(monkeypatch, False)
    assert main.run(["chat", MODEL]) == 1
    assert person.questions == []
