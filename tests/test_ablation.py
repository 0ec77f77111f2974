"""The table of what matters in a drafter: rows that `train` makes, figures that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from redrafter_mlx.bench import ablation
from redrafter_mlx.bench.ablation import FORMS, GIVEN, UNTRAINED, USUAL, Form, Quality, Speed, table
from redrafter_mlx.bench.analyse.summary import WHOLE
from redrafter_mlx.cli import main
from redrafter_mlx.drafting.checkpoint import WEIGHTS


@pytest.mark.parametrize("form", [*FORMS, *GIVEN], ids=lambda form: form.name)
def test_every_form_is_one_that_train_takes(
    form: Form, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = ["--model", str(tmp_path / "no-model"), "--output", str(tmp_path / "out")]
    given = ["--data", str(tmp_path / "no-data"), "--soft-share", "0"] if form in GIVEN else []
    assert main.run(["train", *nowhere, *form.options, *given]) == 1
    missing = "no-data" if form in GIVEN else "no-model"
    assert missing in capsys.readouterr().err


def test_a_row_says_what_each_command_found(tmp_path: Path) -> None:
    forms = (USUAL, UNTRAINED)
    for form in forms:
        (tmp_path / form.name).mkdir()
        (tmp_path / form.name / WEIGHTS).write_bytes(bytes(1_500_000))
    widths = {str(w): 1 + w / 10 for w in (1, 2, 3, 4)}
    drafters: list[Quality] = [
        {"name": str(tmp_path / form.name), "tokens_per_step": widths, "top1": [0.4, 0.31],
         "draft_seconds": {"1": 0.003, "4": 0.021}}
        for form in forms
    ]  # fmt: skip
    rows: list[Speed] = [
        {"drafter": str(tmp_path / form.name), "method": "redrafter", "category": WHOLE,
         "tps": {"median": tps}, "speedup": {"median": tps / 20}}
        for form, tps in zip(forms, (28.04, 19.0), strict=True)
    ]  # fmt: skip
    others: list[Speed] = [
        {**rows[0], "method": "mlx-lm", "drafter": None, "tps": {"median": 20.0}},
        {**rows[1], "category": "coding", "tps": {"median": 99.0}},
    ]

    slower: list[Quality] = [
        {**one, "draft_seconds": {"1": 9.0, "4": 9.0}} for one in drafters
    ]  # fmt: skip
    made = table(forms, tmp_path, slower[::-1], drafters, [*others, *rows])

    usual, untrained = made.rows
    assert usual[1:] == (
        "1.5", "1.10", "1.20", "1.30", "1.40", "40% 31%", "3", "21", "28.0", "1.40x",
    )  # fmt: skip
    assert untrained[-2:] == ("19.0", "0.95x")


def _recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands that are called from here on; none of them runs."""
    ran: list[tuple[str, ...]] = []

    def run(*given: str, **_: object) -> str:
        ran.append(given)
        return json.dumps({"drafters": [{"name": given[1]}]})

    monkeypatch.setattr(ablation, "_run", run)
    return ran


def test_a_finished_drafter_is_not_trained_again_and_an_unfinished_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = _recorded(monkeypatch)
    (tmp_path / "blocks-1").mkdir()
    (tmp_path / "blocks-1" / "README.md").write_text("a card")
    (tmp_path / "blocks-4").mkdir()
    ablation.main(tmp_path, tmp_path, ["--epochs", "1"], only="blocks-1,blocks-4")
    (given,) = (one for one in ran if one[0] == "train")
    assert given[:5] == ("train", "--model", "smollm2-135m", "--output", str(tmp_path / "blocks-4"))
    assert given[5:] == ("--epochs", "1", "--layers", "4", "--timed-questions", "0")


def test_rows_that_learn_choices_alone_read_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = _recorded(monkeypatch)
    common = ["--read", "texts.jsonl", "--epochs", "1"]
    rows = "usual,choices,given-distilled"
    ablation.main(tmp_path, tmp_path, common, data=Path("gold.jsonl"), only=rows)
    trained = [given for given in ran if given[0] == "train"]
    assert ["texts.jsonl" in given for given in trained] == [True, False, False]


def test_rows_with_given_answers_are_asked_no_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = _recorded(monkeypatch)
    common = ["--prompts", "mine.txt", "--epochs", "1", "--own-prompts", "0.5"]
    ablation.main(tmp_path, tmp_path, common, data=Path("gold.jsonl"), only="usual,given-truth")
    usual, given = (one for one in ran if one[0] == "train")
    assert "mine.txt" in usual
    assert given[5:] == (
        "--epochs", "1", "--labels", "data", "--data", "gold.jsonl", "--soft-share", "0",
        "--timed-questions", "0",
    )  # fmt: skip


def test_a_drafter_is_tried_on_the_questions_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = _recorded(monkeypatch)
    for questions in ("people.jsonl", "people.jsonl", "others.jsonl"):
        ablation.main(tmp_path, Path(questions), ["--epochs", "1"], only="usual")
    tried = [given for given in ran if given[0] == "quality"]
    assert [given[given.index("--questions") + 1] for given in tried] == [
        "people.jsonl", "others.jsonl",
    ]  # fmt: skip
    assert {given[1] for given in tried} == {str(tmp_path / "usual")}


def test_a_row_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="no row 'block-1'; choose of usual, "):
        ablation.main(tmp_path, tmp_path, [], only="usual,block-1")
