"""Drafters in training: small students, their texts and losses."""

from __future__ import annotations

from redrafter_mlx.distill.corpus.generation import write_answers
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.forms.positions import PositionStudent
from redrafter_mlx.distill.forms.recurrent import RecurrentRecipe
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.distill.training.trainer import Step, Trainer
from redrafter_mlx.drafting.recurrent import RecurrentNetwork
from redrafter_mlx.target_model.model import Target


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
