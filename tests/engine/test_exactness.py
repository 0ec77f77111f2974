"""When trees are checked: once for each model, setup and code, and again after a failure."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from tiny import byte_model

from redrafter_mlx.engine import exactness
from redrafter_mlx.engine.exactness import check_once
from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.runtime.files.paths import cache_dir
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.tree_check import check_trees


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Target]:
    """The checks that were taken, with a cache of its own."""
    taken: list[Target] = []

    def check(target: Target) -> float:
        taken.append(target)
        return check_trees(target)

    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(exactness, "check_trees", check)
    return taken


def test_a_model_is_checked_once(checks: list[Target]) -> None:
    check_once(Target(byte_model()))
    check_once(Target(byte_model()))
    assert len(checks) == 1
    assert len([*(cache_dir() / "exact").iterdir()]) == 1


def test_other_weights_and_another_dtype_are_checked_too(checks: list[Target]) -> None:
    model = byte_model()
    check_once(Target(model))
    model.update(tree_map(lambda a: a * 1.01, model.parameters()))
    check_once(Target(model))
    assert len(checks) == 2
    model.update(tree_map(lambda a: a.astype(mx.bfloat16), model.parameters()))
    check_once(Target(model))
    assert len(checks) == 3


@pytest.mark.parametrize(
    "file", ["target_model/model.py", "speculation/tree.py", "cpu/fast_functions.py"]
)
def test_changed_code_is_checked_again(
    checks: list[Target], monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """That of a tree's verification, wherever it stands."""
    target = Target(byte_model())
    check_once(target)
    honest = Path.read_bytes

    def changed(path: Path) -> bytes:
        return honest(path) + (b"#" if path.as_posix().endswith(f"redrafter_mlx/{file}") else b"")

    monkeypatch.setattr(Path, "read_bytes", changed)
    check_once(target)
    check_once(target)
    assert len(checks) == 2


def test_a_failed_check_is_repeated(checks: list[Target], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Target) -> float:
        raise UnsupportedModelError("trees are not exact")

    target = Target(byte_model())
    with monkeypatch.context() as patch:
        patch.setattr(exactness, "check_trees", fail)
        with pytest.raises(UnsupportedModelError):
            check_once(target)
    check_once(target)
    assert len(checks) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff", '{"setup": "another"}'])
def test_a_damaged_record_is_replaced(checks: list[Target], text: str) -> None:
    target = Target(byte_model())
    check_once(target)
    (record,) = (cache_dir() / "exact").iterdir()
    record.write_text(text, encoding="utf-8", errors="surrogateescape")
    check_once(target)
    check_once(target)
    assert len(checks) == 2


def test_a_cache_that_cannot_be_written_is_no_error(checks: list[Target]) -> None:
    cache_dir().parent.mkdir(parents=True, exist_ok=True)
    cache_dir().write_text("a file")
    check_once(Target(byte_model()))
    check_once(Target(byte_model()))
    assert len(checks) == 2
