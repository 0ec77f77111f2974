"""`redrafter-mlx quality`: drafters of a model beside each other, on the same questions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import CommandLine
from train_runs import TrainCommand, model, own_cache, prompts, train  # noqa: F401

from redrafter_mlx.loading.load import load


def test_quality_gives_the_steps_of_decoding(
    train: TrainCommand, tmp_path: Path, cli: CommandLine
) -> None:
    output = tmp_path / "drafter"
    train.run(output)
    twin = shutil.copytree(output, tmp_path / "twin")
    questions = train.prompts.read_text().splitlines()[:3]
    few = tmp_path / "few.txt"
    few.write_text("\n".join(questions))
    given = ["quality", str(output), str(twin), str(output), "--model", str(train.model),
             "--questions", str(few), "--beam-width", "2", "--max-tokens", "40"]  # fmt: skip
    shown = cli.json(*given, "--json")
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
    assert "right at position" in cli.out(*given)


def test_quality_shows_tokens_per_step_by_the_questions_category(
    train: TrainCommand, tmp_path: Path, cli: CommandLine
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
        (row,) = cli.json(*quality(category), "--json")["drafters"]
        return row

    by_category = measured(None)["by_category"]
    alone = {name: measured(name) for name in ("coding", "math")}
    assert by_category == {name: one["tokens_per_step"] for name, one in alone.items()}
    assert alone["coding"]["by_category"] == {}
    shown = [line.split() for line in cli.out(*quality(None)).splitlines()]
    assert [words[0] for words in shown[-2:]] == ["coding", "math"]
    assert [len(words) for words in shown[-2:]] == [3, 3]


def test_quality_of_a_drafter_that_is_not_there_is_refused(
    tmp_path: Path, cli: CommandLine
) -> None:
    assert "no drafter at" in cli.error("quality", tmp_path / "none")
