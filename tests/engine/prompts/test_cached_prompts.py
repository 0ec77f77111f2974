"""`redrafter-mlx cache`: what is shown and removed of the prompts on disk."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

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


def test_prompts_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(folder.glob("*/*"))
    assert main.run(["cache", "list", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert sorted(one["path"] for one in shown) == [*map(str, files)]
    assert all(one["bytes"] == Path(one["path"]).stat().st_size for one in shown)
    assert main.run(["cache"]) == 0
    text = capsys.readouterr().out
    assert all(file.name[:12] in text for file in files)


def test_clearing_removes_the_prompts_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["cache", "clear"]) == 0
    assert "removed 2 prompts" in capsys.readouterr().out
    assert [one.name for one in folder.rglob("*") if one.is_file()] == ["notes.txt"]
    assert main.run(["cache", "clear"]) == 0


def test_another_folder_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["cache", "list", "--cache-dir", str(tmp_path / "other")]) == 0
    assert str(tmp_path / "other") in capsys.readouterr().out
    assert main.run(["cache", "list", "--cache-dir", str(folder)]) == 0


def test_what_is_neither_list_nor_clear_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["cache", "purge"]) != 0
    assert "purge" in capsys.readouterr().err


def test_serve_refuses_a_folder_that_it_cannot_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main.run(["serve", "--cache-bytes", "2GB"]) != 0
    assert "cache_dir" in capsys.readouterr().err
    assert stat.S_ISREG((tmp_path / "file").stat().st_mode)
