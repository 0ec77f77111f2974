"""The disk that `redrafter-mlx train` takes for a corpus and checkpoints."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from train_runs import Disk, Keys, TrainCommand

from redrafter_mlx.cli.train.lines import shortfall
from redrafter_mlx.distill import sizes
from redrafter_mlx.distill.corpus.folder import CorpusSize
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.distill.training.checkpoint import CHECKPOINT
from redrafter_mlx.runtime.files.paths import bytes_below

BY_DISK: Keys = {"": {"cache_bytes": None}}
"""Options that leave the size of a corpus to the free disk."""


@pytest.fixture
def no_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "training_bytes", lambda *_: 0)


def test_a_corpus_cut_short_by_the_disk_is_reported() -> None:
    job = TrainingJob(
        model="any", output=Path("out"), answer_tokens=1000, cache_bytes=5000,
        training=TrainOptions(batch=10),
    )  # fmt: skip
    whole = CorpusSize(1, 1, 1000, 0, 10, 4000, {})
    cut = replace(whole, answer_tokens=900)
    assert shortfall(whole, job, 5000, layers=True) is None
    given = replace(job, data=Path("given.jsonl"), labels="data")
    assert shortfall(cut, given, 5000, layers=True) is None
    with_layers, without = (shortfall(cut, job, 5000, layers=layers) for layers in (True, False))
    for note in (with_layers, without):
        assert note is not None
        assert "cache_bytes 5000" in note
        assert "1000" in note
    assert "context layers" in str(with_layers)
    assert "context layers" not in str(without)


@pytest.mark.usefixtures("no_checkpoints")
def test_a_corpus_takes_a_tenth_of_the_free_disk_at_most_and_a_dry_run_says_so(
    train: TrainCommand, disk: Disk, tmp_path: Path
) -> None:
    disk.has(4_000_000)
    many = ("--answer-tokens", "100000")
    shown = train.run(tmp_path / "out", *many, "--dry-run", keys=BY_DISK).out
    assert "400 kB, which holds" in shown
    assert "a tenth of the free disk" in shown
    shown = train.run(tmp_path / "out", *many, keys=BY_DISK).err
    (corpus,) = (tmp_path / "cache" / "corpora").iterdir()
    assert 300_000 < bytes_below(corpus) < 600_000  # the last block goes beyond it
    assert "a tenth of the free disk" in shown


@pytest.mark.usefixtures("no_checkpoints")
def test_a_resumed_run_keeps_the_bound_of_its_corpus_when_the_free_disk_has_changed(
    train: TrainCommand, disk: Disk, tmp_path: Path
) -> None:
    for free in (4_000_000, 9_000_000, 2_000_000):
        disk.has(free)
        train.run(tmp_path / "out", "--answer-tokens", "100000", keys=BY_DISK)


def test_a_disk_without_room_for_the_corpus_is_noticed_before_it_is_written(
    train: TrainCommand, disk: Disk, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    disk.has(1000)
    assert "1 kB are free" in train.run(output, "--dry-run").out
    refused = train.refused(output)
    for what in ("REDRAFTER_CACHE", "--answer-tokens", "cache_bytes"):
        assert what in refused
    assert not [*(tmp_path / "cache" / "corpora").rglob("block-*")]


def test_a_run_with_a_whole_corpus_needs_room_for_two_checkpoints(
    train: TrainCommand, disk: Disk, tmp_path: Path
) -> None:
    """A new one is written beside the last one."""
    output = tmp_path / "out"
    train.run(output)
    saved = (output / CHECKPOINT).stat().st_size
    shutil.rmtree(output)
    disk.has(1.5 * saved)
    train.refused(output)
    disk.has(2.5 * saved)
    train.run(output)


@pytest.mark.usefixtures("no_checkpoints")
def test_only_what_is_missing_of_a_corpus_needs_room_on_the_disk(
    train: TrainCommand, disk: Disk, tmp_path: Path
) -> None:
    """Here the states of layers that an earlier drafter did not read; and a copy of a block, as
    file managers make them, is not one."""
    train.run(tmp_path / "one", keys={"drafter": {"context_layers": []}})
    (corpus,) = (tmp_path / "cache" / "corpora").iterdir()
    block = next(corpus.glob("block-*.safetensors"))
    shutil.copy(block, block.with_stem(f"{block.stem} copy"))
    before = bytes_below(corpus)
    disk.has(300_000)
    train.run(tmp_path / "two")
    assert 200_000 < bytes_below(corpus) - before < 300_000
