"""Drafters in training: small students, their texts and losses."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
from tiny import byte_tokenizer, random_drafter, random_model

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.examples import Examples
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.shards import Shard, Text, save_shard
from redrafter_mlx.distill.corpus.writing.generation import write_answers
from redrafter_mlx.distill.forms.fresh_weights import scale_recurrent
from redrafter_mlx.distill.forms.recurrent import RecurrentRecipe
from redrafter_mlx.distill.forms.students import PositionStudent
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.distill.training.learner import Step
from redrafter_mlx.distill.training.trainer import Trainer
from redrafter_mlx.drafting.recurrent import RecurrentNetwork
from redrafter_mlx.target_model.model import Target

SHAPES = [BeamShape(1, 4), BeamShape(2, 4)]
NOTHING = Extras()


def make_trainer(
    folder: Path, *, steps: int = 12, seed: int = 0, extras: Extras = NOTHING, **changes: object
) -> Trainer:
    target = Target(random_model())
    shards = folder / "corpus"
    shards.mkdir(exist_ok=True)
    paths = []
    answers = extras.compute(target, texts(target))
    for i in range(3):
        paths.append(shards / f"block-{i:06d}.safetensors")
        if not paths[-1].exists():
            some = answers[i * 4 : i * 4 + 4]
            save_shard(Shard(some, {}), paths[-1], {})
            extras.add(target, byte_tokenizer(), paths[-1], i)
    options = TrainOptions(
        **{"draft_length": 3, "batch": 16, "evaluations": 3, "seed": seed, **changes}  # type: ignore[arg-type]
    )
    drafter = random_drafter(
        seed=5, head="tied", draft_vocab_size=80, context_layers=extras.context
    )
    scale_recurrent(drafter, mx.ones((drafter.config.context_size,)), 0.2, 5.0)
    examples = Examples(tuple(paths), extras, options, 3000)
    student = student_of(drafter, target.reading(extras.context), options)
    output = folder / "out"
    output.mkdir(exist_ok=True)
    return Trainer(student, examples, answers[:2], steps, SHAPES, output, {"seed": seed})


def texts(target: Target, count: int = 12) -> list[Text]:
    prompts = [[i + 1, 2 * i + 3] for i in range(count)]
    return [Text(w.prompt, w.answer, w.states) for w in write_answers(target, prompts, [], 24)]


def student_of(drafter: RecurrentNetwork, target: Target, options: TrainOptions) -> PositionStudent:
    return RecurrentRecipe(drafter.config).student(drafter.bind(target), target, options)


def losses(trainer: Trainer, until: int | None = None) -> list[float]:
    found: list[float] = []
    stop = (lambda: len(found) == until) if until else (lambda: False)
    for event in trainer.run(stop):
        if isinstance(event, Step):
            found.append(event.loss)
    return found
