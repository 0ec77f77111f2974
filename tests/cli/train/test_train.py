"""`redrafter-mlx train`, from the command line to a drafter that decodes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from command_line import CommandLine
from train_runs import Keys, TrainCommand, arguments, losses, options_file, steps_logged, unwrapped

from redrafter_mlx.cli import main
from redrafter_mlx.distill.corpus.shards import load_shard
from redrafter_mlx.distill.report.metrics import read_metrics
from redrafter_mlx.drafting.files.installed import drafter_folder
from redrafter_mlx.drafting.recurrent_config import read_config
from redrafter_mlx.loading.load import load
from redrafter_mlx.weights.fit.machine import this_machine


@pytest.fixture
def read(tmp_path: Path) -> Keys:
    """Options with 20 texts that are only read."""
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"A text of {i} words or more." for i in range(20)))
    return {"": {"read": [str(texts)]}}


def test_train_ends_with_a_drafter_that_is_used_and_a_verdict(
    train: TrainCommand, tmp_path: Path
) -> None:
    output = tmp_path / "drafter[x]"
    keys: Keys = {"": {"timed_questions": 1}, "training": {"evaluations": 2, "epochs": 4}}
    shown = train.run(output, keys=keys)
    assert "On this machine it" in shown.out
    assert f"--drafter {shlex.quote(str(output))}" in shown.out
    assert "tokens/step" in shown.out
    assert "corpus:" in shown.err
    assert {p.name for p in output.iterdir()} >= {
        "config.json", "model.safetensors", "metrics.jsonl", "README.md", "train.toml",
    }  # fmt: skip
    config = read_config(output)
    assert config.target_fingerprint is not None
    assert config.draft_vocab_size == 100
    assert config.context_layers == (0, 1)
    assert sum(record["event"] == "evaluation" for record in read_metrics(output)) >= 2
    assert losses(output)[-1] < losses(output)[0]

    answer = load(train.model, output).generate([5, 6, 7], max_tokens=48, draft=True)
    plain = load(train.model, None).generate([5, 6, 7], max_tokens=48)
    assert answer.token_ids == plain.token_ids


def test_a_block_is_held_out_and_as_many_texts_are_read_as_a_block_has_answers(
    train: TrainCommand, read: Keys, tmp_path: Path
) -> None:
    output = tmp_path / "drafter"
    train.run(output, keys=read)
    (corpus,) = (tmp_path / "cache" / "corpora").iterdir()
    learnt = [bool(load_shard(path).texts) for path in sorted(corpus.glob("prompts/block-*"))]
    assert learnt[0] is False  # held out
    assert any(learnt)
    texts = [len(load_shard(path).texts) for path in sorted(corpus.glob("read-*/block-*"))]
    assert sum(texts) == 20
    assert texts[0] == 15  # as many as the block has answers
    assert " 0 tokens read" not in (output / "README.md").read_text()


def test_with_the_same_options_nothing_is_left_to_do_and_with_other_texts_it_is_another_run(
    train: TrainCommand, read: Keys, tmp_path: Path, cli: CommandLine
) -> None:
    output = tmp_path / "drafter"
    train.run(output, keys=read)
    before = (output / "model.safetensors").read_bytes()
    again = ["train", "--config", str(output / "train.toml"), "--output", str(output)]
    assert main.run(again) == 0
    assert (output / "model.safetensors").read_bytes() == before
    more = str(int(0.9 * this_machine().memory))
    assert main.run([*again, "--memory", more]) == 0, "the order of batches stays"
    assert "give more --memory" in unwrapped(cli.error(*again, "--memory", "1500000000"))
    (output / "metrics.jsonl").unlink()
    assert main.run(again) == 0
    assert "The log of its training was removed" in (output / "README.md").read_text()
    assert "run with read" in train.refused(output)


def test_in_another_folder_the_options_of_a_run_make_the_same_drafter(
    train: TrainCommand, read: Keys, tmp_path: Path
) -> None:
    first, twin = tmp_path / "first", tmp_path / "twin"
    train.run(first, keys=read)
    assert main.run(["train", "--config", str(first / "train.toml"), "--output", str(twin)]) == 0
    for name in ("model.safetensors", "train.toml"):
        assert (first / name).read_bytes() == (twin / name).read_bytes()


def test_the_smallest_run_that_is_accepted_holds_some_out_and_ends_with_a_drafter(
    train: TrainCommand, tmp_path: Path
) -> None:
    output = tmp_path / "drafter"
    train.run(output, "--answer-tokens", "64", "--draft-length", "1", "--epochs", "0.1")
    assert (output / "model.safetensors").exists()


def test_labels_of_given_answers_are_the_answers_or_the_targets_continuations(
    model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"Say {i}", "response": f"I say {i}, as you wished."} for i in range(80)]
    data.write_text("\n".join(map(json.dumps, rows)))
    steps = []
    for labels in ("data", "target"):
        output = tmp_path / labels
        keys: Keys = {"": {"learn_prompts": False, "answer_tokens": 1000}}
        config = options_file(tmp_path / "options.toml", keys)
        given = ["train", "--config", str(config), "--model", str(model), "-o", str(output)]
        assert main.run([*given, "--data", str(data), "--labels", labels]) == 0
        assert read_config(output).draft_vocab_size == 100
        steps.append(len(steps_logged(output)))
    assert steps[0] == steps[1] > 20, "as many passes over as many positions"


def test_without_an_output_the_drafter_is_where_auto_looks(
    model: Path, prompts: Path, tmp_path: Path, cli: CommandLine
) -> None:
    given = arguments(model, prompts, tmp_path / "unused")
    at = given.index("--output")
    del given[at : at + 2]
    assert main.run([*given, "--dry-run"]) == 0
    folder = tmp_path / "cache" / "drafters" / "model"
    assert not folder.exists()
    (used,) = (x for x in cli.out(*given).splitlines() if x.startswith("use it: "))
    assert used == f"use it: redrafter-mlx chat {model}"
    assert (folder / "model.safetensors").exists()
    assert load(model, "trained", offline=True).drafting == "drafter"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("mlx-community/Qwen3-8B-4bit", "Qwen3-8B-4bit"),
        ("lmsys/vicuna-7b-v1.3@refs/pr/4", "vicuna-7b-v1.3"),
        ("/home/me@work/my model/", "my-model"),
        ("models/a.Q4_0.gguf", "a.Q4_0.gguf"),
        ("..", "model"),
    ],
)
def test_the_default_folder_of_a_drafter_has_its_models_name(
    model: str, name: str, tmp_path: Path
) -> None:
    assert drafter_folder(model) == tmp_path / "cache" / "drafters" / name
