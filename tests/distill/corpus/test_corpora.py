"""`redrafter-mlx corpora`: corpora are listed, and one is removed, and nothing but one."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine
from fresh_process import python

from redrafter_mlx.cli import main
from redrafter_mlx.distill.corpus.shards import Shard, Text, save_shard
from redrafter_mlx.distill.corpus.stored import find_corpus, list_corpora, remove_corpus
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files.atomic_write import locked

KEY, OTHER = "0123456789abcdef", "0fedcba987654321"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of two corpora, and of folders that are none."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    folder = tmp_path / "corpora"
    for key, blocks in ((KEY, 1), (OTHER, 3)):
        for block in range(blocks):
            write_block(folder / key / f"block-{block:06d}.safetensors")
    write_block(folder / KEY / "prompts" / "block-000000.safetensors")
    write_block(folder / KEY / "states-1-2" / "block-000000.safetensors")
    (folder / KEY / ".12-34.block-000001.safetensors").touch()  # was interrupted
    (folder / "empty").mkdir()
    (folder / "mine").mkdir()
    (folder / "mine" / "block-000000.safetensors").write_text("notes")
    return folder


def write_block(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = Text([1], np.arange(5, dtype=np.int32), np.zeros((5, 4), np.float32))
    save_shard(Shard([text], {}), path, {"model": "org/base"})


@pytest.mark.usefixtures("shelf")
def test_corpora_are_listed_with_model_tokens_and_size(cli: CommandLine) -> None:
    listed = cli.json("corpora", "--json")
    assert {corpus["key"] for corpus in listed} == {KEY, OTHER}
    assert {corpus["model"] for corpus in listed} == {"org/base"}
    assert [c["answer_tokens"] for c in listed if c["key"] == OTHER] == [15]
    assert listed[0]["nbytes"] >= listed[1]["nbytes"] > 0
    assert KEY in cli.out("corpora")


def test_a_corpus_is_removed_by_the_beginning_of_its_key_with_all_that_is_its(
    shelf: Path, cli: CommandLine
) -> None:
    (shelf / KEY / ".DS_Store").touch()  # Finder's, of a folder that was looked at
    (shelf / KEY / "prompts" / ".DS_Store").touch()
    assert KEY in cli.out("corpora", "--remove", "01")
    assert not (shelf / KEY).exists()
    assert sorted(os.listdir(shelf)) == sorted([OTHER, "empty", "mine"])


@pytest.mark.parametrize("key", ["0", "9", "", "mine", "..", "empty"])
def test_a_key_of_no_corpus_or_of_several_removes_nothing(
    key: str, shelf: Path, cli: CommandLine
) -> None:
    before = sorted(shelf.rglob("*"))
    assert KEY in cli.error("corpora", "--remove", key)
    assert sorted(shelf.rglob("*")) == before


@pytest.mark.parametrize(
    "other", ["notes.txt", "notes/a.txt", "prompts/notes.txt", "block-000009.safetensors"]
)
def test_a_folder_that_holds_anything_else_is_not_removed(other: str, shelf: Path) -> None:
    path = shelf / KEY / other
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".safetensors":
        (shelf.parent / "mine.safetensors").touch()
        path.symlink_to(shelf.parent / "mine.safetensors")
    else:
        path.touch()
    before = sorted(shelf.rglob("*"))
    with pytest.raises(BadInputError, match="nothing was removed"):
        remove_corpus(find_corpus(KEY))
    assert sorted(shelf.rglob("*")) == before


def test_a_corpus_that_a_run_uses_or_of_another_user_is_not_removed(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        locked(shelf / KEY, "taken", shared=True),
        locked(shelf / KEY, "taken", shared=True),  # two runs may use it
        pytest.raises(BadInputError, match="used by a run"),
    ):
        remove_corpus(find_corpus(KEY))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(BadInputError, match="another user"):
        remove_corpus(find_corpus(KEY))
    assert len(list_corpora()) == 2


def test_a_terminal_is_asked_first(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    asked: list[str] = []

    def confirm(text: str, *, abort: bool, err: bool) -> None:
        asked.append(text)
        assert abort
        assert err
        raise KeyboardInterrupt

    monkeypatch.setattr("typer.confirm", confirm)
    assert main.run(["corpora", "--remove", KEY]) != 0
    assert KEY in asked[0]
    assert (shelf / KEY).exists()


def test_listing_corpora_imports_no_mlx() -> None:
    code = (
        "import sys; from redrafter_mlx.distill.corpus.stored import list_corpora; list_corpora()\n"
        "print([m for m in ('mlx.core', 'transformers') if m in sys.modules])"
    )
    assert python(code, REDRAFTER_CACHE="/nowhere") == "[]"


def test_no_corpora_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "none"))
    assert "train" in cli.out("corpora")
