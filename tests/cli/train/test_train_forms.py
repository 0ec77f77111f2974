"""Forms of drafters that `redrafter-mlx train` makes, and drafters that it trains further."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from command_line import CommandLine
from mlx.utils import tree_flatten
from mtp_samples import random_head, target_model, without_ones
from train_runs import Keys, TrainCommand, losses, save_folder

from redrafter_mlx.distill.report.metrics import read_metrics
from redrafter_mlx.loading.load import load


def test_a_drafter_is_trained_further_on_other_text(train: TrainCommand, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train.run(first)
    further = ("--start-from", str(first), "--seed", "1")
    assert "num_draft_layers 1" in train.refused(second, *further, "--layers", "2")
    assert not second.exists()
    assert len(list((tmp_path / "cache/corpora").iterdir())) == 1
    assert "give another --output" in train.refused(first, "--start-from", str(first))
    train.run(second, *further)
    assert len(list((tmp_path / "cache/corpora").iterdir())) == 2
    assert sum(losses(second)[:10]) / 10 < sum(losses(first)[:10]) / 10 - 0.1
    assert "random weights" in (first / "README.md").read_text()
    assert "a trained drafter, `sha256:" in (second / "README.md").read_text()
    assert "started_from" in train.refused(second, "--seed", "1")


def test_a_tied_head_is_trained_further_with_another_draft_vocabulary(
    train: TrainCommand, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    train.run(first)
    for size, stored in (("150", [(150,)]), ("all", [])):
        second = tmp_path / size
        train.run(second, "--start-from", str(first), "--draft-vocab", size, "--seed", "1")
        assert sum(losses(second)[:10]) / 10 < sum(losses(first)[:10]) / 10 - 0.1
        arrays = mx.load(str(second / "model.safetensors"))
        assert [array.shape for name, array in arrays.items() if name == "draft_vocab"] == stored


def test_another_architecture_is_trained_for_by_the_same_command(
    prompts: Path, tmp_path: Path, cli: CommandLine
) -> None:
    """In the paper's own form."""
    qwen = save_folder(tmp_path / "qwen", "qwen3")
    output = tmp_path / "drafter"
    paper: Keys = {
        "drafter": {"head": "own", "draft_vocab": "all", "context_layers": []},
        "training": {"soft_share": 0},
    }
    TrainCommand(qwen, prompts, cli).run(output, keys=paper)
    stored = json.loads((output / "config.json").read_text())
    assert "draft_vocab_size" not in stored
    assert stored["head"] == "own"
    assert "context_layers" not in stored
    assert load(qwen, output).drafting == "drafter"


@pytest.mark.parametrize("anew", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_models_own_head_is_trained_further_from_its_files_or_anew(
    anew: bool, prompts: Path, tmp_path: Path, cli: CommandLine
) -> None:
    """And is exported as a folder of its own, with which the model decodes."""
    network = target_model("qwen3_5")
    qwen = save_folder(tmp_path / "qwen", model=network)
    weights = dict(tree_flatten(network.parameters()))
    head = {f"mtp.{name}": array for name, array in without_ones(random_head(network)).items()}
    for file in qwen.glob("model*"):
        file.unlink()
    mx.save_safetensors(str(qwen / "model.safetensors"), weights | head, {"format": "mlx"})
    form = {"form": "mtp", **dict.fromkeys(("draft_vocab", "layers", "context_layers"))}
    output = tmp_path / "drafter"
    start = () if anew else ("--start-from", str(qwen))
    TrainCommand(qwen, prompts, cli).run(output, *start, keys={"drafter": form})
    assert losses(output)[-1] < losses(output)[0]
    drafted = load(qwen, output)
    assert drafted.drafting == "MTP"
    answer = drafted.generate([5, 6, 7], max_tokens=24, draft=True)
    assert answer.token_ids == load(qwen, None).generate([5, 6, 7], max_tokens=24).token_ids


@pytest.mark.parametrize(
    ("form", "drafter", "title", "parameters", "drafts"),
    [
        pytest.param("medusa", {}, "A set of Medusa heads", 2 * (32 * 32 + 32 + 100 * 32), 2,
                     marks=pytest.mark.exhaustive),
        pytest.param("mlp", {"draft_vocab": None}, "An MLP speculator",
                     2 * (258 * 32 + 32 * 32 + 32), 2, marks=pytest.mark.exhaustive),
        ("eagle", {}, "A decoder layer", 32 * (64 + 3 * 64 + 32 + 3 * 85 + 6 + 100), 5),
    ],
)  # fmt: skip
def test_another_form_is_trained_used_and_compared_by_the_same_commands(
    form: str, drafter: dict[str, object], title: str, parameters: int, drafts: int,
    train: TrainCommand, tmp_path: Path, cli: CommandLine,
) -> None:  # fmt: skip
    first, second = tmp_path / "first", tmp_path / "second"
    keys: Keys = {
        "": {"timed_questions": 1},
        "training": {"draft_length": 2},
        "drafter": {"layers": None, "context_layers": None, **drafter},
    }
    train.run(first, "--form", form, "--dry-run", keys=keys)
    train.run(first, "--form", form, keys=keys)
    assert f"{title} that guesses" in (first / "README.md").read_text()
    train.run(second, "--form", form, "--start-from", str(first), keys=keys)
    assert sum(losses(second)[:5]) < sum(losses(first)[:5])

    few = tmp_path / "few.txt"
    few.write_text("What is one?\nWhat is two?")
    compare = ["quality", str(first), str(second), "--model", str(train.model)]
    compare += ["--questions", str(few), "--max-tokens", "16", "--beam-length", "6", "--json"]
    rows = cli.json(*compare)["drafters"]
    assert [len(row["top1"]) for row in rows] == [drafts, drafts]
    assert rows[0]["parameters"] == parameters
    assert rows[0]["bytes"] == (first / "model.safetensors").stat().st_size
    assert rows[0]["training_seconds"] == read_metrics(first)[-1]["seconds"]

    drafted, plain = load(train.model, first), load(train.model, None)
    answers = [m.generate("What is it?", max_tokens=24).token_ids for m in (drafted, plain)]
    assert answers[0] == answers[1]
