"""The shipped drafters: small, complete, and made for the models that the registry names."""

from __future__ import annotations

from pathlib import Path

import pytest

from redrafter_mlx.distill.options_file import OPTIONS, make_job, read_options
from redrafter_mlx.drafting.files.installed import find_drafters
from redrafter_mlx.drafting.recurrent_config import read_config
from redrafter_mlx.weights import SHIPPED_DRAFTERS
from redrafter_mlx.weights.files.folder import read_safetensors_header
from redrafter_mlx.weights.registry import REGISTRY

SHELF = SHIPPED_DRAFTERS
SHIPPED = sorted(path.parent for path in SHELF.glob("*/config.json"))


def test_one_ships_for_the_default_model() -> None:
    assert "smollm2-135m" in [folder.name for folder in SHIPPED]


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_a_shipped_drafter_is_small_whole_and_explained(folder: Path) -> None:
    config = read_config(folder)
    header = read_safetensors_header(folder / "model.safetensors")
    assert header.shapes["draft_vocab"] == (config.draft_vocab_size,)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 20_000_000
    assert "redrafter-mlx train" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_the_options_of_a_shipped_drafter_are_those_of_train(folder: Path, tmp_path: Path) -> None:
    job, config = make_job(read_options(folder / OPTIONS), tmp_path), read_config(folder)
    assert job.model == folder.name == config.target
    assert job.drafter.draft_vocab == config.draft_vocab_size
    assert job.drafter.layers == config.num_draft_layers


def test_the_default_model_finds_its_drafter_by_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    pinned = REGISTRY["smollm2-135m"].pinned
    assert pinned is not None
    folders, damaged = find_drafters(f"sha256:{pinned.sha256}")
    assert folders == [SHELF / "smollm2-135m"]
    assert not damaged
    assert find_drafters("sha256:of another model")[0] == []
    assert find_drafters("sha256:of another model", None)[0] == []
