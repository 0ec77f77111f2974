"""`redrafter-mlx cache`: what is shown and removed of the prompts on disk."""

from __future__ import annotations

import stat
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from command_line import CommandLine

from redrafter_mlx.cli import main
from redrafter_mlx.decoding.cache.prefix_store import PrefixStore, StoredPrefix
from redrafter_mlx.decoding.cache.text_store import TextStore
from redrafter_mlx.drafting.untrained.continuation import EarlierState


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a prompt, earlier texts, and a file of somebody's."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    store = PrefixStore(tmp_path / "prompts", 10**9, "model")
    array = mx.zeros((1, 1000))
    mx.eval(array)
    store.save(StoredPrefix(np.arange(400), ((array,),), 400, 400))
    store.close()
    texts = TextStore(tmp_path / "prompts", 10**9, "texts", 500)
    texts.save(EarlierState([[*range(400)]], []))
    texts.close()
    (tmp_path / "prompts" / "notes.txt").write_text("mine")
    return tmp_path / "prompts"


def test_prompts_are_listed(folder: Path, cli: CommandLine) -> None:
    files = sorted(folder.glob("*/*"))
    shown = cli.json("cache", "list", "--json")
    assert sorted(one["path"] for one in shown) == [*map(str, files)]
    assert all(one["bytes"] == Path(one["path"]).stat().st_size for one in shown)
    text = cli.out("cache")
    assert all(file.name[:12] in text for file in files)


def test_clearing_removes_the_prompts_and_nothing_else(folder: Path, cli: CommandLine) -> None:
    assert "removed 2 prompts" in cli.out("cache", "clear")
    assert [one.name for one in folder.rglob("*") if one.is_file()] == ["notes.txt"]
    assert main.run(["cache", "clear"]) == 0


def test_another_folder_is_named(folder: Path, tmp_path: Path, cli: CommandLine) -> None:
    assert str(tmp_path / "other") in cli.out("cache", "list", "--cache-dir", tmp_path / "other")
    assert main.run(["cache", "list", "--cache-dir", str(folder)]) == 0


def test_what_is_neither_list_nor_clear_is_refused(cli: CommandLine) -> None:
    assert "purge" in cli.error("cache", "purge")


def test_serve_refuses_a_folder_that_it_cannot_use(tmp_path: Path, cli: CommandLine) -> None:
    (tmp_path / "file").write_text("")
    assert "cache_dir" in cli.error("serve", "--cache-bytes", "2GB")
    assert stat.S_ISREG((tmp_path / "file").stat().st_mode)
