"""What `redrafter-mlx train --dry-run` counts, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from command_line import CommandLine
from tiny import byte_model, byte_tokenizer
from train_runs import TrainCommand, options_file, save_folder, unwrapped

from redrafter_mlx.target_model.fingerprint import nbytes_of


def sizes(shown: str) -> dict[str, str]:
    """Return the amounts that a dry run shows, by name."""
    return {line[:20].strip(): line[20:].strip() for line in shown.splitlines()}


def steps(shown: dict[str, str]) -> int:
    return int(shown["training"].split()[0].replace(",", ""))


def test_dry_run_prints_sizes_and_writes_nothing(train: TrainCommand, tmp_path: Path) -> None:
    output = tmp_path / "drafter"
    shown = sizes(train.run(output, "--dry-run").out)
    amounts = {"drafter", "corpus on disk", "checkpoints", "memory", "training", "time"}
    assert amounts | {"writing the corpus"} < set(shown)
    assert not output.exists()
    assert not (tmp_path / "cache" / "corpora").exists()


@pytest.mark.parametrize("more", [[], ["--recipe", "paper"], ["--hours", "8"], ["--quantize", "4"]])
def test_a_dry_run_computes_nothing_and_names_what_it_did_not_measure(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    model = byte_model(hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
    weights = nbytes_of(model)
    folder = save_folder(tmp_path / "large", model=model)
    del model
    mx.clear_cache()

    def computed(*_: object) -> None:
        raise AssertionError("a dry run computes something")

    for function in ("eval", "async_eval"):
        monkeypatch.setattr(mx, function, computed)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    shown = cli.out("train", folder, "-o", tmp_path / "out", "--dry-run", *more)
    assert mx.get_peak_memory() - before < weights / 10
    assert "not measured" in shown
    assert "steps" in shown


def test_a_dry_run_downloads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    def fetched(*_: object) -> None:
        raise AssertionError("it asks the Hub")

    monkeypatch.setattr("redrafter_mlx.weights.fetching.resolve.fetch", fetched)
    line = ["train", "org/not-here", "-o", str(tmp_path / "out"), "--dry-run"]
    assert "pull org/not-here" in cli.error(*line)


def test_dry_run_counts_given_answers_and_texts_that_are_only_read(
    model: Path, tmp_path: Path, cli: CommandLine
) -> None:
    output, given, texts = tmp_path / "drafter", tmp_path / "given.jsonl", tmp_path / "texts.txt"
    pairs = [{"prompt": f"Question {i}?", "response": f"The answer is {i}."} for i in range(10, 50)]
    given.write_text("\n".join(map(json.dumps, pairs)))
    texts.write_text("\n".join(f"A text of {i} words or more." for i in range(20)))

    def line(keys: dict[str, object]) -> list[str]:
        config = options_file(tmp_path / "options.toml", {"": {"answer_tokens": 4000, **keys}})
        return [
            "train", "--model", str(model), "--output", str(output), "--data", str(given),
            "--labels", "data", "--config", str(config),
        ]  # fmt: skip

    def dry_run(**keys: object) -> dict[str, str]:
        return sizes(cli.out(*line(keys), "--dry-run"))

    shown = dry_run()
    each = len(byte_tokenizer().encode("The answer is 10.<|im_end|>"))
    assert shown["answers"] == f"{40 * each} tokens"
    assert "writing the corpus" not in shown
    assert "reading the answers" in shown
    assert steps(shown) < steps(dry_run(read=[str(texts)])) < 3 * steps(shown)

    given.write_text(json.dumps({"prompt": "A question?", "response": ""}))
    for more in ([], ["--dry-run"]):
        refused = unwrapped(cli.error(*line({}), *more))
        assert "given.jsonl" in refused
        assert "cache_bytes" not in refused
    assert not output.exists()


def test_options_of_the_command_win_over_those_of_the_file(
    train: TrainCommand, tmp_path: Path
) -> None:
    two, one = (
        steps(sizes(train.run(tmp_path / "out", *more, "--dry-run").out))
        for more in ((), ("--epochs", "1"))
    )
    assert two == pytest.approx(2 * one, abs=1)
