"""The memory of a training run follows from its byte counts, and the dry run reports it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import mlx.core as mx
import pytest
from macs import mac
from tiny import random_model

from redrafter_mlx.distill.corpus.writing.generation import row_bytes, write_answers
from redrafter_mlx.distill.drafter_forms import RecurrentForm
from redrafter_mlx.distill.forms.registry import recipe_for
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.memory_plan import MemoryPlan, check_memory, plan_memory
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.registry import REGISTRY

VICUNA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
          "head_dim": 128, "hidden_size": 16, "intermediate_size": 16}  # fmt: skip
"""Keys and values of Vicuna-7B: half a MiB for each token in float16."""


def planned(target: Target, memory: int | None, workers: int | None = 1) -> MemoryPlan:
    job = TrainingJob(
        "tiny", Path("out"), memory=memory, drafter=RecurrentForm(exit_dim=32),
        training=TrainOptions(batch=64), workers=workers,
    )  # fmt: skip
    recipe = recipe_for(job.drafter, target, "tiny", "", job.training.draft_length)
    return plan_memory(job, recipe, target, 1_000_000)


def test_a_token_of_vicunas_cache_shape_counts_half_a_mebibyte() -> None:
    model = random_model(**VICUNA)
    model.set_dtype(mx.float16)
    target = Target(model)
    assert row_bytes(target, 256) == 256 * 2**19 + 12 * target.vocab_size
    assert row_bytes(target, 257) == 288 * 2**19 + 12 * target.vocab_size


def test_writing_takes_the_memory_it_was_given_whatever_the_model() -> None:
    target = Target(random_model(**VICUNA))
    row = row_bytes(target, 93)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    write_answers(target, [[1, 2, 3]] * 6, [], 90, stop_at_loops=False, room=3 * row + row // 2)
    taken = mx.get_peak_memory() - before
    assert 0.8 * 3 * row < taken < 1.2 * 3 * row


def test_a_plan_stays_within_the_memory_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(mac(64), on_cpu=True)
    monkeypatch.setattr("redrafter_mlx.distill.memory_plan.this_machine", lambda: machine)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    target, workers = Target(random_model(**VICUNA)), []
    for memory in (2_000_000_000, 6_000_000_000, 40_000_000_000):
        plan = planned(target, memory, workers=None)
        assert plan.writing <= memory
        assert plan.training <= memory
        workers.append(plan.workers)
    assert workers[0] < workers[1] <= workers[2] == 8


def test_too_little_memory_is_refused_with_the_least_that_does() -> None:
    target = Target(random_model(**VICUNA))
    with pytest.raises(BadInputError, match="memory is 1 kB;") as refused:
        planned(target, 1000)
    least = int(str(refused.value).split("--memory ")[1])
    assert planned(target, least).room >= row_bytes(target, 256)
    with pytest.raises(BadInputError):
        planned(target, least - 1)


@pytest.mark.parametrize("gigabytes", [8, 16, 64])
def test_training_stays_within_a_macs_working_set(
    gigabytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = mac(gigabytes)
    monkeypatch.setattr("redrafter_mlx.distill.memory_plan.this_machine", lambda: machine)
    target = Target(random_model(**VICUNA))
    assert planned(target, None).peak <= machine.working_set
    check_memory(None, machine)
    check_memory(machine.working_set, machine)
    with pytest.raises(BadInputError, match=str(machine.working_set)):
        check_memory(machine.working_set + 1, machine)
    on_cpu = replace(machine, on_cpu=True)
    check_memory(machine.working_set + 1, on_cpu)
    with pytest.raises(BadInputError, match=str(machine.memory)):
        check_memory(machine.memory + 1, on_cpu)


@pytest.mark.parametrize("name", ["mistral-7b", "llama-3.1-8b", "qwen3-8b"])
def test_a_16_gb_mac_trains_for_the_named_8b_models_by_default(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, size = mac(16), REGISTRY[name].shape
    row = size.cache_bytes(256)
    monkeypatch.setattr("redrafter_mlx.distill.memory_plan.this_machine", lambda: machine)
    monkeypatch.setattr("redrafter_mlx.distill.memory_plan.row_bytes", lambda *_: row)
    target = SimpleNamespace(
        hidden_size=size.hidden, vocab_size=size.vocab, n_layers=size.layers, dtype=mx.bfloat16
    )
    job = TrainingJob(name, Path("out"))
    recipe = recipe_for(job.drafter, cast(Target, target), name, "", 5)
    plan = plan_memory(job, recipe, cast(Target, target), REGISTRY[name].size)
    assert machine.memory // 2 < plan.peak <= machine.working_set


def test_a_model_too_large_to_train_here_gets_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(mac(8), working_set=1000)
    monkeypatch.setattr("redrafter_mlx.distill.memory_plan.this_machine", lambda: machine)
    with pytest.raises(BadInputError, match="smaller model") as refused:
        planned(Target(random_model(**VICUNA)), None)
    assert "--memory" not in str(refused.value)
