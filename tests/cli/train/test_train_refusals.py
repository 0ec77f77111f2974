"""Runs of `redrafter-mlx train` that are refused before anything is written, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import CommandLine
from train_runs import Keys, TrainCommand, options_file, unwrapped


def pairs(count: int) -> str:
    """Return the lines of a file of prompts with their answers."""
    rows = [{"prompt": f"Question {i}?", "response": f"The answer is {i}."} for i in range(count)]
    return "\n".join(map(json.dumps, rows))


def test_too_little_memory_is_refused_before_anything_is_written(
    train: TrainCommand, tmp_path: Path
) -> None:
    refused = train.refused(tmp_path / "out", "--memory", "1000000")
    assert "memory is 1 MB" in refused
    assert "--memory" in refused
    assert not (tmp_path / "cache" / "corpora").exists()


@pytest.mark.parametrize(("more", "own"), [([], True), (["--raw"], False)])
def test_too_few_prompts_are_refused_with_a_remedy_that_is_allowed(
    more: list[str], own: bool, train: TrainCommand, tmp_path: Path
) -> None:
    """A model that only continues plain texts writes no prompts."""
    train.prompts.write_text("Who?")
    refused = train.refused(tmp_path / "drafter", *more)
    assert "holds 1 prompt," in refused
    assert ("own_share" in refused) is own


def test_prompts_too_few_to_hold_some_out_are_refused_before_anything_is_written(
    train: TrainCommand, tmp_path: Path
) -> None:
    train.prompts.write_text("\n".join(f"Question {i}?" for i in range(10)))
    assert "prompts.txt holds 10 prompts" in train.refused(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_conversations_too_few_to_hold_some_out_are_refused_before_anything_is_written(
    model: Path, tmp_path: Path, cli: CommandLine
) -> None:
    data, output = tmp_path / "few.jsonl", tmp_path / "out"
    data.write_text(pairs(32))
    config = options_file(tmp_path / "options.toml", {})
    given = ["train", "--model", str(model), "-o", str(output), "--data", str(data)]
    assert "few.jsonl holds 32 conversations" in unwrapped(cli.error(*given, "--config", config))
    assert not output.exists()


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("test.parquet", b"PAR1\x15\x04\xff\xfePAR1", "is a Parquet file; write it as JSON lines"),
        (
            "speed.jsonl",
            b'{"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING '
            b'SPECDEC_BENCH"]}',
            "placeholder in 1 question",
        ),
    ],
)
@pytest.mark.parametrize("option", ["--prompts", "--data"])
def test_files_of_question_sets_that_are_not_prepared_are_refused(
    option: str, name: str, content: bytes, named: str, model: Path, tmp_path: Path,
    cli: CommandLine,
) -> None:  # fmt: skip
    (tmp_path / name).write_bytes(content)
    given = ["train", "--model", str(model), "-o", str(tmp_path / "out")]
    (error,) = cli.error(*given, option, tmp_path / name).splitlines()
    assert name in error
    assert named in error
    assert not (tmp_path / "out").exists()


def test_layers_that_the_target_lacks_are_refused_before_anything_is_written(
    train: TrainCommand, tmp_path: Path
) -> None:
    keys: Keys = {"drafter": {"context_layers": [1, 7]}}
    assert "layers 1, 7" in train.refused(tmp_path / "out", keys=keys)
    assert not (tmp_path / "out").exists()


def test_soft_labels_that_are_not_there_are_refused(
    train: TrainCommand, tmp_path: Path, cli: CommandLine
) -> None:
    """For texts that are only read, and for the target's continuations of given answers."""
    hard: Keys = {"": {"read": ["x.txt"]}, "training": {"soft_share": 0}}
    assert "soft_share is 0" in train.refused(tmp_path / "out", keys=hard)
    soft: Keys = {"": {"data": "x.jsonl"}, "training": {"soft_share": 0.5}}
    config = options_file(tmp_path / "options.toml", soft)
    assert "soft_share is 0.5" in cli.error("train", "--config", config, "-o", tmp_path / "out")


def test_an_output_that_is_a_link_to_nothing_is_refused_before_anything_is_loaded(
    train: TrainCommand, tmp_path: Path
) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    assert "gone, which is not there" in train.refused(tmp_path / "out")
