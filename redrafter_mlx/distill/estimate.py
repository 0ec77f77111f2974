"""Estimated time of a training run, from a short trial of each stage on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.cpu.door import cores_shared_by
from redrafter_mlx.distill.corpus.folder import CorpusJob
from redrafter_mlx.distill.corpus.generation import write_answers
from redrafter_mlx.distill.corpus.prompts.user_turns import TURN_TOKENS
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.corpus.writer import Writer
from redrafter_mlx.distill.forms.form import Recipe
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.memory_plan import PROMPT_TOKENS, MemoryPlan
from redrafter_mlx.distill.sizes import Sizes, sizes, tokens_read
from redrafter_mlx.distill.training.learner import Learner
from redrafter_mlx.target_model.model import Target

_TRIED_TOKENS, _TRIED_TEXTS = 6, 4
_LEAST_SHARE = 0.05
"""Minimum share of a trial's time that its tokens take; a busy machine's clock may show less."""

_FEW_TEXTS, _FEW_POSITIONS = 6, 64
"""Sizes of small trials, which predict how long a trial of the whole batch would take."""

_MORE_BATCHES = 2

_PLAIN_TOKENS = 9
"""Number of tokens in a trial of plain decoding."""

_TURNS = 1.3
"""User turns drawn for each prompt that the target writes, of which some are left out."""


@dataclass(frozen=True)
class Estimate(Sizes):
    """The sizes of a run, and its seconds, from short trials on this machine."""

    writing_seconds: float = field(kw_only=True)
    training_seconds: float = field(kw_only=True)


def estimate(
    corpus: CorpusJob,
    recipe: Recipe,
    target: Target,
    tokenizer: TokenizerWrapper,
    plan: Callable[[int], MemoryPlan],
    most_seconds: float = math.inf,
) -> Estimate:
    """Try a small part of both stages and scale the times up; arguments and errors as of `sizes`.

    most_seconds: time limit for the trials; if whole batches take longer, parts of batches are
                  tried, which overestimates a little
    """
    known = sizes(corpus, recipe, target, tokenizer, plan)
    job, source = corpus.job, corpus.source(target, tokenizer)
    with cores_shared_by(plan(0).workers):
        if isinstance(source, Writer):
            seconds = largest_trial(
                lambda texts: _writing_seconds(job, texts, corpus.room, target),
                max(_FEW_TEXTS, len(job.writing.openings)),
                job.writing.batch,
                most_seconds / 2,
            )
        else:
            seconds = _trial(source.sample)
        seconds *= known.answer_tokens
        for texts in corpus.extras.read:
            if texts.texts:
                read = tokens_read(corpus, texts, tokenizer, known.answer_tokens)
                seconds += read * _trial(partial(texts.sample, target, tokenizer))
    of_step = largest_trial(
        lambda size: _step_seconds(job, size, target, recipe),
        _FEW_POSITIONS,
        job.training.batch,
        most_seconds / 2,
    )
    return Estimate(
        **vars(known),
        writing_seconds=seconds / known.workers,
        training_seconds=known.steps * of_step,
    )


def largest_trial(
    trial: Callable[[int], float], few: int, whole: int, most_seconds: float
) -> float:
    """Return the result of a trial of the `whole` batch, or of as much as fits in `most_seconds`.

    A trial of a `few` shows how much fits.
    """
    size = whole
    if math.isfinite(most_seconds) and few < whole:
        began = time.monotonic()
        found = trial(few)
        took = time.monotonic() - began
        size = min(whole, int(few * (most_seconds - took) / took))
        if size <= few:
            return found
    return trial(size)


def _trial(read: Callable[[int], list[Text]]) -> float:
    """Return seconds per token; `read(n)` has the target read n texts."""
    read(1)
    began = time.monotonic()
    texts = read(_TRIED_TEXTS)
    tokens = sum(len(text.answer) for text in texts)
    return (time.monotonic() - began) / max(1, tokens)


def plain_seconds(target: Target) -> float:
    """Return the seconds per token of plain decoding."""
    write_answers(target, [[1, 1]], [], 2)  # warms up
    began = time.monotonic()
    write_answers(target, [[1, 1]], [], _PLAIN_TOKENS)
    return (time.monotonic() - began) / _PLAIN_TOKENS


def _writing_seconds(job: TrainingJob, texts: int, room: int | None, target: Target) -> float:
    """Return seconds per answer token, prompts included, if a process writes `texts` at once."""
    writing = job.writing
    prompts = [[1] * PROMPT_TOKENS] * (texts // len(writing.openings) or 1)
    openings = (0,) * len(writing.openings)

    def seconds(tokens: int) -> float:
        began = time.monotonic()
        write_answers(target, prompts, [], tokens, openings=openings, room=room)
        return time.monotonic() - began

    first, long = seconds(1), seconds(1 + _TRIED_TOKENS)
    short = min(first, seconds(1))  # the first call compiled
    of_column = max(long - short, _LEAST_SHARE * long) / _TRIED_TOKENS
    turns = writing.own_share * _TURNS / len(openings)  # per answer
    columns = writing.max_answer_tokens + turns * TURN_TOKENS
    total = short + of_column * columns
    return total / (len(prompts) * len(openings) * writing.max_answer_tokens)


def _step_seconds(job: TrainingJob, size: int, target: Target, recipe: Recipe) -> float:
    """Return the seconds of one optimiser step, from batches of `size` positions."""
    training = replace(job.training, batch=size)
    student = recipe.student(recipe.bind(recipe.network(), target), target, training)
    learner, loss = Learner(student, 1), student.trial()

    def seconds(batches: int) -> float:
        began = time.monotonic()
        learner.step([loss] * batches)
        return time.monotonic() - began

    seconds(1)  # compiles
    one = seconds(1)
    batches = job.training.batches * job.training.batch / size
    if batches <= 1:
        return one
    several = seconds(1 + _MORE_BATCHES)  # the time of the optimiser itself stays the same
    of_batch = max(several - one, _LEAST_SHARE * several) / _MORE_BATCHES
    return one + (batches - 1) * of_batch
