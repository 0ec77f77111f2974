"""Training: it fits its batches, resumes exactly, and leaves nothing half-written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from students import losses, make_trainer, student_of, texts
from tiny import HIDDEN, load_drafter, random_drafter, random_model

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.examples import lay_out
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.distill.training.checkpoint import CHECKPOINT, read_checkpoint
from redrafter_mlx.distill.training.learner import Learner, Step
from redrafter_mlx.distill.training.trainer import Evaluation, Trainer
from redrafter_mlx.drafting.recurrent_config import read_config
from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.target_model.model import Target


def parameters(trainer: Trainer) -> dict[str, mx.array]:
    return dict(tree_flatten(trainer.student.network.trainable_parameters()))


@pytest.mark.parametrize(("size", "batches"), [(576, 1), (2048, 2), (4096, 4)])
def test_large_models_take_more_batches_a_step_because_muon_costs_more(
    size: int, batches: int
) -> None:
    assert TrainOptions().for_size(size).batches == batches
    assert TrainOptions(optimizer="adamw").for_size(size).batches == 1
    assert TrainOptions(accumulate=3).for_size(size).batches == 3


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulate": 2},
        {"extras": Extras((0, 1))},
        {"optimizer": "adamw"},
        {"keep_start": 0.3},
    ],
)
def test_a_resumed_run_has_the_losses_of_the_unbroken_one(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    unbroken = losses(make_trainer(tmp_path / "a", **changes))
    first = losses(make_trainer(tmp_path / "b", **changes), until=5)
    second = losses(make_trainer(tmp_path / "b", **changes), until=2)
    third = losses(make_trainer(tmp_path / "b", **changes))
    assert len(unbroken) == 12
    assert first + second + third == unbroken
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a/out" / name).read_bytes() == (tmp_path / "b/out" / name).read_bytes()


@pytest.mark.parametrize("until", [9, None])
def test_a_saved_drafter_that_has_changed_is_written_again_with_a_word(
    until: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses(make_trainer(tmp_path), until)
    weights = tmp_path / "out" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(damaged := whole[:-1] + bytes([whole[-1] ^ 1]))
    trainer = make_trainer(tmp_path)
    assert "model.safetensors has changed" in caplog.text
    assert [event.best for event in trainer.run() if isinstance(event, Evaluation)]
    assert weights.read_bytes() != damaged
    caplog.clear()
    make_trainer(tmp_path)
    assert not caplog.records


def test_a_killed_run_loses_no_more_than_was_done_since_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a stop or an end, which save too; here the state is saved after every step."""
    monkeypatch.setattr("redrafter_mlx.distill.training.trainer.SAVE_SECONDS", 0.0)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    unbroken = losses(make_trainer(tmp_path / "whole"))
    run = make_trainer(tmp_path / "killed").run()
    while (event := next(run)) and not (isinstance(event, Step) and event.step == 6):
        pass
    saved = read_checkpoint(tmp_path / "killed/out")
    assert saved is not None
    assert saved.progress.step == 5
    assert losses(make_trainer(tmp_path / "killed")) == unbroken[5:]


def test_saved_weights_are_interpolated_with_those_of_the_start(tmp_path: Path) -> None:
    for name in ("kept", "not"):
        (tmp_path / name).mkdir()
    trainer = make_trainer(tmp_path / "kept", keep_start=0.25, evaluations=1)
    start = parameters(trainer)
    kept, plain = losses(trainer), losses(make_trainer(tmp_path / "not", evaluations=1))
    assert kept == plain  # interpolation does not affect training
    learnt = parameters(trainer)
    saved = mx.load(str(tmp_path / "kept/out/model.safetensors"))
    for name, end in learnt.items():
        between = (0.25 * start[name] + 0.75 * end).astype(mx.float16)
        assert mx.array_equal(saved[name], between), name
    assert any(mx.max(mx.abs(start[n] - learnt[n])).item() > 0.01 for n in learnt)


def test_a_run_of_other_options_is_not_mixed_in(tmp_path: Path) -> None:
    losses(make_trainer(tmp_path), until=2)
    with pytest.raises(BadInputError, match="seed 0, not 1"):
        make_trainer(tmp_path, seed=1)


def test_one_batch_is_fitted_exactly() -> None:
    target = Target(random_model())
    answers = texts(target, 3)
    drafter = random_drafter(seed=1, head="own", exit_dim=2 * HIDDEN)
    options = TrainOptions(draft_length=3, soft_share=0.0, learning_rate=1e-2, warmup_share=0.01)
    student = student_of(drafter, target, options)
    learner = Learner(student)
    laid = lay_out(answers, 3)
    loss = partial(student.loss, laid.batch(0, len(laid)))
    first = learner.step([loss], 0.0)
    for step in range(1, 301):
        last = learner.step([loss], step / 400)
    assert last < 0.05 * first
    quality = student.evaluate(answers, [BeamShape(1, 4)])
    assert min(quality.top1) > 0.95
    assert quality.tokens_per_step[1] > 3.7  # 4 is the maximum


def test_accumulated_batches_equal_one_of_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(random_model())
    laid = lay_out(texts(target, 4), 3)
    size = len(laid) // 2
    given: list[dict[str, mx.array]] = []
    for batches in ([laid.batch(0, size), laid.batch(size, size)], [laid.batch(0, 2 * size)]):
        drafter = random_drafter(seed=1)
        options = TrainOptions(draft_length=3, soft_share=0.0, depth_decay=1.0, clip=1000)
        student = student_of(drafter, target, options)
        learner = Learner(student)
        monkeypatch.setattr(
            learner.optimizer, "update", lambda _, each: given.append(dict(tree_flatten(each)))
        )
        learner.step([partial(student.loss, batch) for batch in batches], 0.5)
    accumulated, whole = given
    for name, gradient in whole.items():
        scale = mx.max(mx.abs(gradient)).item()
        assert scale > 0, name
        np.testing.assert_allclose(accumulated[name], gradient, rtol=1e-3, atol=1e-5 * scale)


def test_the_best_drafter_is_saved_and_loads(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    seen = [e for e in trainer.run() if isinstance(e, Evaluation)]
    assert len(seen) == 3
    means = [np.mean(list(e.quality.tokens_per_step.values())) for e in seen]
    assert [e.best for e in seen] == [mean > max([0.0, *means[:i]]) for i, mean in enumerate(means)]
    drafter = load_drafter(tmp_path / "out", Target(random_model()))
    assert drafter.config == read_config(tmp_path / "out")


@pytest.mark.parametrize(("steps", "looks", "at"), [
    (12, 3, [4, 8, 12]), (11, 3, [4, 8, 11]), (7, 2, [4, 7]), (3, 10, [1, 2, 3]),
])  # fmt: skip
def test_held_out_texts_are_evaluated_as_often_as_asked_and_at_the_end(
    tmp_path: Path, steps: int, looks: int, at: list[int]
) -> None:
    trainer = make_trainer(tmp_path, steps=steps, evaluations=looks)
    assert [e.step for e in trainer.run() if isinstance(e, Evaluation)] == at


def test_the_order_of_batches_depends_on_seed_and_pass_alone(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    examples = trainer.examples
    first = [np.array(b.roots) for b in examples.epoch(0)]
    again = [np.array(b.roots) for b in examples.epoch(0, skip=3)]
    assert all(np.array_equal(x, y) for x, y in zip(first[3:], again, strict=True))
    second = [np.array(b.roots) for b in examples.epoch(1)]
    assert not np.array_equal(np.concatenate(first), np.concatenate(second))


KILLED = """
import os, signal
import redrafter_mlx
from pathlib import Path
import mlx.core as mx
from students import make_trainer, losses
trainer = make_trainer(Path({folder!r}))
losses(trainer, until=4)
real = mx.save_safetensors
def dying(path, arrays, metadata=None):
    real(path, arrays, metadata)
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) // 2)
    os.kill(os.getpid(), signal.SIGKILL)
mx.save_safetensors = dying
losses(trainer)
"""


def test_killed_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    unbroken = tmp_path / "unbroken"
    unbroken.mkdir()
    want = losses(make_trainer(unbroken))
    folder = tmp_path / "killed"
    folder.mkdir()
    script = textwrap.dedent(KILLED.format(folder=str(folder)))
    died = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    saved = read_checkpoint(folder / "out")
    assert saved is not None
    assert saved.progress.step == 4
    trainer = make_trainer(folder)
    assert losses(trainer) == want[4:]
    assert not [p for p in os.listdir(folder / "out") if p.startswith(".") and CHECKPOINT in p]


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    losses(make_trainer(tmp_path), until=1)
    path = tmp_path / "out" / CHECKPOINT
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DamagedFileError, match=CHECKPOINT):
        make_trainer(tmp_path)


@pytest.mark.parametrize("left_out", ["drafter.", "step"])
def test_a_checkpoint_that_lacks_a_part_is_refused_by_name(tmp_path: Path, left_out: str) -> None:
    """Otherwise the run would go on from other weights than those that it has trained."""
    losses(make_trainer(tmp_path), until=1)
    path = tmp_path / "out" / CHECKPOINT
    arrays, metadata = mx.load(str(path), return_metadata=True)
    assert isinstance(arrays, dict)
    mx.eval(arrays)
    kept = {name: array for name, array in arrays.items() if not name.startswith(left_out)}
    if left_out == "step":
        metadata["state"] = metadata["state"].replace('"step": 1', '"step": "1"')
        assert '"step": "1"' in metadata["state"]
    else:
        assert len(kept) < len(arrays)
    mx.save_safetensors(str(path), kept, metadata)
    with pytest.raises(DamagedFileError, match=f"{CHECKPOINT}.*delete it"):
        make_trainer(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"soft_share": 1.5}, "soft_share is 1.5"),
        ({"learning_rate": -1.0}, "learning_rate is -1"),
        ({"optimizer": "sgd"}, "optimizer is .sgd."),
    ],
)
def test_bad_options_are_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(BadInputError, match=named):
        TrainOptions(**changes)  # type: ignore[arg-type]


def test_accuracy_along_training_texts_is_that_of_the_drafter_that_is_evaluated(
    tmp_path: Path,
) -> None:
    trainer = make_trainer(tmp_path, evaluations=2)
    trainer.seen = trainer.held_out
    found = [event for event in trainer.run() if isinstance(event, Evaluation)]
    assert len(found) == 2
    for evaluation in found:
        assert evaluation.training_top1 == evaluation.quality.top1
    assert any(evaluation.training_top1[0] > 0 for evaluation in found)
