"""The plan of a training run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from train_runs import model, own_cache  # noqa: F401

from redrafter_mlx.distill.drafter_forms import RecurrentForm
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.plan import plan
from redrafter_mlx.distributed.group import Ranks


def test_a_model_without_row_masks_is_written_one_text_at_a_time_with_a_note(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = TrainingJob(
        model=str(model), output=tmp_path / "out", drafter=RecurrentForm(context_layers=())
    )
    run = plan(job)
    assert not run.notes
    monkeypatch.setattr(run.target, "row_masks", False)
    (note,) = run.notes
    assert "llama" in note
    assert "one at a time" in note


def test_ranks_whose_options_store_other_files_are_refused(model: Path, tmp_path: Path) -> None:
    facts: list[dict[str, str]] = []
    ranks = cast(Ranks, SimpleNamespace(agree=facts.append))
    for drafter, learn_prompts in (
        (RecurrentForm(context_layers=()), True),
        (RecurrentForm(context_layers=()), False),
        (RecurrentForm(context_layers=(1,)), True),
    ):
        plan(
            TrainingJob(str(model), tmp_path, drafter=drafter, learn_prompts=learn_prompts),
            ranks=ranks,
        )
    assert len({fact["set of files"] for fact in facts}) == 3
    assert not any(str(tmp_path) in fact["set of files"] for fact in facts)
