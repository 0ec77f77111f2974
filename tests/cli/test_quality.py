"""`redrafter-mlx quality`: drafters of a model beside each other, on the same questions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from train_runs import TrainCommand, model, own_cache, prompts, train  # noqa: F401

from redrafter_mlx.cli import main
from redrafter_mlx.loading.load import load


def test_quality_gives_the_steps_of_decoding(
    train: TrainCommand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "drafter"
    train.run(output)
    twin = shutil.copytree(output, tmp_path / "twin")
    questions = train.prompts.read_text().splitlines()[:3]
    few = tmp_path / "few.txt"
    few.write_text("\n".join(questions))
    given = ["quality", str(output), str(twin), str(output), "--model", str(train.model),
             "--questions", str(few), "--beam-width", "2", "--max-tokens", "40"]  # fmt: skip
    assert main.run([*given, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    row, other = shown["drafters"]
    assert [row["name"], other["name"]] == [str(output), str(twin)]
    assert row["tokens_per_step"] == other["tokens_per_step"]
    assert row["draft_seconds"]["2"] > 0 < other["draft_seconds"]["2"]
    drafted = load(train.model, output)
    steps = tokens = 0
    for line in questions:
        answer = drafted.generate(line, max_tokens=40, beam_width=2, beam_length=4)
        steps += answer.steps
        tokens += len(answer.token_ids) - 1
    # Decoding also counts its last step, which the limit may cut short.
    assert row["tokens_per_step"]["2"] == pytest.approx(tokens / steps, rel=0.1)
    assert main.run(given) == 0
    assert "right at position" in capsys.readouterr().out


def test_quality_shows_tokens_per_step_by_the_questions_category(
    train: TrainCommand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a category are the same as if its questions were asked alone."""
    output = tmp_path / "drafter"
    train.run(output)
    rows = [
        {"question_id": f"{i}", "category": category, "turns": [f"Is it {i}?"]}
        for i, category in enumerate(["coding", "math", "coding", "math"])
    ]

    def quality(category: str | None) -> list[str]:
        """Return the command on the questions of a category, or on all."""
        file = tmp_path / f"{category}.jsonl"
        asked = [row for row in rows if category in (None, row["category"])]
        file.write_text("\n".join(map(json.dumps, asked)))
        return ["quality", str(output), "--model", str(train.model), "--questions", str(file),
                "--beam-width", "1,2", "--max-tokens", "24"]  # fmt: skip

    def measured(category: str | None) -> dict[str, object]:
        assert main.run([*quality(category), "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["drafters"]
        return row

    by_category = measured(None)["by_category"]
    alone = {name: measured(name) for name in ("coding", "math")}
    assert by_category == {name: one["tokens_per_step"] for name, one in alone.items()}
    assert alone["coding"]["by_category"] == {}
    assert main.run(quality(None)) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[0] for words in shown[-2:]] == ["coding", "math"]
    assert [len(words) for words in shown[-2:]] == [3, 3]


def test_quality_of_a_drafter_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["quality", str(tmp_path / "none")]) != 0
    assert "no drafter at" in capsys.readouterr().err
