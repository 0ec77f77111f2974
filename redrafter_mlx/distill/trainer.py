"""The training loop: batches in, a better drafter out, and a state that can be resumed exactly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.acceptance import DraftQuality, measure_quality
from redrafter_mlx.distill.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from redrafter_mlx.distill.examples import Examples, Places
from redrafter_mlx.distill.loss import Batch, distillation_loss, output_index
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.drafter import Drafter
from redrafter_mlx.drafter_files import save_drafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.sampling import log_softmax
from redrafter_mlx.target import Target

_SAVE_SECONDS = 120.0
"""A run that is killed loses at most so much."""


@dataclass(frozen=True)
class Step:
    """One step of the optimiser; `loss` is the mean over its batches."""

    step: int
    steps: int
    loss: float
    learning_rate: float
    places_per_second: float


@dataclass(frozen=True)
class Evaluation:
    """A look at held-out texts; `best` if the drafter was saved for it."""

    step: int
    quality: DraftQuality
    best: bool


Event = Step | Evaluation


@dataclass
class _Position:
    """Where in the order of batches training stands."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best: float = 0.0


class Trainer:
    """One training run of a drafter in a folder.

    Only the drafter's parameters are trained; the target is asked for its embedding, its output
    rows, and nothing else.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        examples: Examples,
        held_out: Places,
        options: TrainOptions,
        steps: int,
        shapes: Sequence[BeamShape],
        folder: Path,
        made_by: dict[str, object],
    ) -> None:
        """Raises BadInputError if the folder holds another run."""
        self.drafter, self.target, self.options = drafter, target, options
        self.examples, self.held_out, self.shapes = examples, held_out, shapes
        self.steps, self.folder, self.made_by = steps, folder, made_by
        self.bound = drafter.bind(target)
        self.outputs = output_index(self.bound, target.vocab_size)
        self._rows = target.output_rows(self.bound.tokens) if options.soft_share else None
        self.optimizer = optim.AdamW(
            learning_rate=_schedule(options, steps),
            betas=[0.9, 0.95],
            weight_decay=options.weight_decay,
        )
        self.optimizer.init(drafter.trainable_parameters())
        self._at = _Position()
        self._resume()

    def run(self, stop: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """Train to the end, or until `stop()`; the state is saved either way."""
        every = max(1, self.steps // self.options.evaluations)
        saved = time.monotonic()
        began, places = time.monotonic(), 0
        batches = self._batches()
        while self._at.step < self.steps and not stop():
            loss = self._step(batches)
            places += self.options.batch * self.options.accumulate
            rate = places / max(time.monotonic() - began, 1e-9)
            yield Step(self._at.step, self.steps, loss, self._learning_rate(), rate)
            if self._at.step % every == 0 or self._at.step == self.steps:
                yield self._evaluate()
                began, places = time.monotonic(), 0
            if time.monotonic() - saved > _SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()

    def save(self) -> None:
        """Write the run's state, from which the same command goes on."""
        at = self._at
        save_checkpoint(
            Checkpoint(
                dict(tree_flatten(self.drafter.trainable_parameters())),
                dict(tree_flatten(self.optimizer.state)),
                self.made_by,
                at.step,
                at.epoch,
                at.batch,
                at.best,
            ),
            self.folder,
        )

    def _resume(self) -> None:
        found = load_checkpoint(self.folder)
        if found is None:
            return
        differing = [k for k, v in self.made_by.items() if found.made_by.get(k) != v]
        if differing:
            key = differing[0]
            raise BadInputError(
                f"{self.folder} holds a run with {key} {found.made_by.get(key)!r}, not "
                f"{self.made_by[key]!r}; give another --output, or the same options to go on"
            )
        self.drafter.load_weights(list(found.drafter.items()), strict=False)
        self.optimizer.state = tree_unflatten(list(found.optimizer.items()))
        self._at = _Position(found.step, found.epoch, found.batch, found.best)

    def _batches(self) -> Iterator[Batch]:
        """Batch after batch, pass after pass, from where the run stands."""
        while True:
            got = False
            for batch in self.examples.epoch(self._at.epoch, self._at.batch):
                self._at.batch += 1
                got = True
                yield batch
            if not got and self._at.batch == 0:
                raise BadInputError("the corpus is smaller than one batch; write more of it")
            self._at.epoch, self._at.batch = self._at.epoch + 1, 0

    def _step(self, batches: Iterator[Batch]) -> float:
        """One step of the optimiser over `accumulate` batches; the mean loss."""
        count = self.options.accumulate
        compute = nn.value_and_grad(self.drafter, self._loss)
        total, gradients = mx.zeros(()), None
        for _ in range(count):
            loss, fresh = compute(next(batches))
            total = total + loss
            gradients = fresh if gradients is None else _add(gradients, fresh)
            mx.eval(total, gradients)
        assert gradients is not None
        scaled = tree_unflatten([(k, g * (1 / count)) for k, g in tree_flatten(gradients)])
        clipped, _ = optim.clip_grad_norm(scaled, self.options.clip)
        self.optimizer.update(self.drafter, clipped)
        mx.eval(self.drafter.parameters(), self.optimizer.state)
        self._at.step += 1
        return float(total.item()) / count

    def _loss(self, batch: Batch) -> mx.array:
        teacher = None
        if self._rows is not None:
            teacher = log_softmax(self._rows(batch.states.astype(self.target.dtype)))
        opt = self.options
        return distillation_loss(
            self.bound, batch, self.outputs, teacher, opt.depth_weights, opt.soft_share
        )

    def _evaluate(self) -> Evaluation:
        """Measure, and keep the drafter if none was better."""
        quality = measure_quality(self.bound, self.held_out, self.target.vocab_size, self.shapes)
        mean = sum(quality.tokens_per_step.values()) / len(quality.tokens_per_step)
        best = mean > self._at.best
        if best:
            self._at.best = mean
            save_drafter(self.drafter, self.folder, dtype=mx.float16)
        return Evaluation(self._at.step, quality, best)

    def _learning_rate(self) -> float:
        return float(self.optimizer.learning_rate.item())


def initialise(drafter: Drafter, context_rms: mx.array, embedding_rms: float) -> None:
    """Scale a fresh drafter's inputs to unit size, by their weights.

    A target's hidden states have a few coordinates far larger than the rest, and its embeddings
    are small; left as they are, the first would drown the others.

    Shapes:
      context_rms: [D], of the hidden states, coordinate by coordinate
    """
    D = drafter.config.hidden_size
    scale = mx.concatenate([1 / mx.maximum(context_rms, 1e-6), mx.ones((D,))])
    if drafter.config.exit_dim != 2 * D:
        drafter.input_proj.weight = drafter.input_proj.weight * scale
    else:
        for block in drafter.lm_head[: drafter.config.num_draft_layers]:
            block.linear.weight = block.linear.weight * scale
        if drafter.config.head == "tied":
            drafter.output_proj.weight = drafter.output_proj.weight * scale
        else:
            drafter.lm_head[-1].weight = drafter.lm_head[-1].weight * scale
    if drafter.config.rnn:
        drafter.rnn_w.weight = drafter.rnn_w.weight / embedding_rms
    if drafter.config.head == "tied":
        drafter.output_norm.weight = mx.full((D,), 0.2)


def _schedule(options: TrainOptions, steps: int) -> Callable[[mx.array], mx.array]:
    """Warm-up, then a cosine down to a tenth."""
    warmup = max(1, round(options.warmup_share * steps))
    high = options.learning_rate
    rise = optim.linear_schedule(high / warmup, high, warmup)
    fall = optim.cosine_decay(high, max(1, steps - warmup), high / 10)
    joined: Callable[[mx.array], mx.array] = optim.join_schedules([rise, fall], [warmup])
    return joined


def _add(left: object, right: object) -> object:
    """The sum of two trees of arrays."""
    others = dict(tree_flatten(right))
    return tree_unflatten([(name, array + others[name]) for name, array in tree_flatten(left)])
