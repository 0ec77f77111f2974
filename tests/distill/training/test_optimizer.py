"""Muon for a drafter's matrices, AdamW for its other parameters."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from backends import frees_at_once
from mlx.utils import tree_flatten
from students import student_of, texts
from tiny import HIDDEN, random_drafter, random_model

from redrafter_mlx.distill.corpus.examples import lay_out
from redrafter_mlx.distill.forms.form import Student
from redrafter_mlx.distill.options import Optimizer, TrainOptions
from redrafter_mlx.distill.training.learner import Learner
from redrafter_mlx.drafting.recurrent_config import Head
from redrafter_mlx.target_model.model import Target

RATE = 1e-3


def moved(head: Head, optimizer: Optimizer) -> dict[str, np.ndarray]:
    """Return the change of each parameter by one training step at the highest learning rate."""
    target = Target(random_model())
    laid = lay_out(texts(target, 4), 3)
    drafter = random_drafter(seed=1, head=head, exit_dim=2 * HIDDEN)
    before = {k: np.array(v) for k, v in tree_flatten(drafter.trainable_parameters())}
    options = TrainOptions(
        draft_length=3, soft_share=0.0, optimizer=optimizer, learning_rate=RATE, weight_decay=0.0
    )
    student = student_of(drafter, target, options)
    highest = options.warmup_share
    Learner(student).step([partial(student.loss, laid.batch(0, len(laid)))], highest)
    after = dict(tree_flatten(drafter.trainable_parameters()))
    return {name: np.array(after[name]) - start for name, start in before.items()}


@pytest.mark.parametrize("head", ["tied", "own"])
def test_muon_moves_matrices_equally_in_all_directions_and_adamw_the_rest(head: Head) -> None:
    ours, adamw = moved(head, "muon"), moved(head, "adamw")
    matrices = [n for n, moves in ours.items() if moves.ndim == 2 and n != "lm_head.2.weight"]
    assert len(matrices) == (5 if head == "tied" else 4)  # two blocks, recurrence, output_proj
    for name in matrices:
        sizes, adamws = (np.linalg.svd(m[name], compute_uv=False) for m in (ours, adamw))
        # Five Newton-Schulz iterations scale every direction that gradients reach to about 1.
        assert 0.6 < sizes[0] / (20 * RATE) < 1.3, name
        quarter = len(sizes) // 4
        assert sizes[quarter] > 0.6 * sizes[0], name
        assert adamws[quarter] < 0.5 * adamws[0], name
    for name in set(ours) - set(matrices):
        np.testing.assert_allclose(ours[name], adamw[name], atol=1e-7, err_msg=name)
        assert mx.any(mx.array(ours[name]) != 0), name


@frees_at_once
@pytest.mark.parametrize("batches", [1, 4])
def test_a_step_keeps_no_gradients_while_weights_are_made(batches: int) -> None:
    network = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])
    student = SimpleNamespace(
        network=network,
        options=TrainOptions(optimizer="adamw"),
        recipe=SimpleNamespace(by_adamw=lambda _: True),
    )
    learner = Learner(cast(Student, student))
    losses = [lambda: mx.sum(network(mx.ones((1, 256))))] * batches
    learner.step(losses, 0.1)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    learner.step(losses, 0.2)
    # The sum of the gradients, those of one batch, and the temporaries of their use.
    assert mx.get_peak_memory() - before < 4 * 8 * 256 * 256 * 4


def test_gradients_keep_their_digits_where_a_small_loss_would_make_them_subnormal() -> None:
    """Parts of a gradient are 1e-42 on their way back, and the same ones as of a usual loss."""

    def trained(power: int) -> tuple[mx.array, list[mx.array]]:
        passed: list[mx.array] = []
        through = mx.custom_function(lambda x: x)

        def on_its_way(_: mx.array, cotangent: mx.array, __: mx.array) -> mx.array:
            passed.append(cotangent)
            return cotangent

        through.vjp(on_its_way)
        network = nn.Linear(4, 4, bias=False)
        network.weight = mx.random.normal((4, 4), key=mx.random.key(0))
        inputs = mx.random.normal((3, 4), key=mx.random.key(1)) * 2.0**power
        weights = mx.random.uniform(shape=(3, 4), key=mx.random.key(2))
        student = SimpleNamespace(
            network=network,
            options=TrainOptions(optimizer="adamw"),
            recipe=SimpleNamespace(by_adamw=lambda _: True),
        )

        def loss() -> mx.array:
            outputs = through(network(inputs)) * weights
            return mx.sum(outputs) * 2.0 ** (-power / 2) * 2.0 ** (-power / 2) * 2.0**-20

        Learner(cast(Student, student)).step([loss] * 3, 0.5)
        return network.weight, passed

    usual, _ = trained(0)
    found, passed = trained(120)
    assert len(passed) == 3
    assert all(mx.all(mx.abs(each) > 2.0**-126).item() for each in passed)
    assert mx.array_equal(found, usual)


@pytest.mark.parametrize("final", [0.1, 0.0, 1.0])
def test_rates_warm_up_and_fall_to_the_share_that_was_asked_for(final: float) -> None:
    target = Target(random_model())
    laid = lay_out(texts(target, 2), 3)
    options = TrainOptions(
        draft_length=3, soft_share=0.0, learning_rate=RATE, warmup_share=0.2, final_rate=final
    )
    student = student_of(random_drafter(seed=1), target, options)
    learner, rates = Learner(student), []
    for step in range(25):  # after the last step it stays constant
        learner.step([partial(student.loss, laid.batch(0, len(laid)))], min(1.0, step / 20))
        rates.append(learner.learning_rate)
    top = rates.index(max(rates))
    assert 0 < rates[0] < RATE / 2
    assert top == 4
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top] == pytest.approx(RATE)
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == pytest.approx(final * RATE)
