"""What a training run will take, from a trial of each stage and arithmetic on bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.distill.corpus.generation import write_answers
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.corpus.workers import CorpusJob
from redrafter_mlx.distill.corpus.writer import Writer
from redrafter_mlx.distill.forms.form import Recipe
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.memory_plan import MemoryPlan
from redrafter_mlx.distill.training.learner import Learner
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.target.model import Target

_TRIED_TOKENS, _TRIED_TEXTS = 6, 4
_LEAST_SHARE = 0.05
"""Of a trial, what its tokens took at least, whatever the clock says on a busy machine."""

_PROMPT_TOKENS = 64

_PLAIN_TOKENS = 8
"""Of a trial of plain decoding."""

_TURNS, _TURN_TOKENS = 1.3, 64
"""Turns drawn for one prompt that the target writes itself, as some are left out; tokens of one."""

_PROMPT_SHARE = 0.5
"""Tokens of prompts that are trained on, of the answers'; a prompt may have several."""


@dataclass(frozen=True)
class Estimate:
    """Counts, bytes and seconds; seconds are from a short trial on this machine.

    answer_tokens: those asked for; of given answers no more than there are
    corpus_bytes:  hidden states and tokens on disk
    most_bytes:    that the corpus may take there
    drafter_bytes: of the stored weights
    memory_bytes:  most at once: target, a batch being written or trained on, states
    """

    answer_tokens: int
    parameters: int
    drafter_bytes: int
    corpus_bytes: int
    most_bytes: int
    memory_bytes: int
    steps: int
    writing_seconds: float
    training_seconds: float


def estimate(
    corpus: CorpusJob,
    recipe: Recipe,
    target: Target,
    tokenizer: TokenizerWrapper,
    plan: Callable[[int], MemoryPlan],
) -> Estimate:
    """Try a little of both stages and multiply.

    target: reading what the recipe reads
    plan: what the run holds in memory, for a corpus of so many bytes

    Raises BadInputError, naming the file, for given conversations without a usable answer.
    """
    job, source = corpus.job, corpus.source(target, tokenizer)
    if isinstance(source, Writer):
        answers, seconds = job.answer_tokens, _writing_seconds(job, corpus.room, target)
    else:
        answers, (seconds, _) = source.count_tokens(job.answer_tokens), _trial(source.sample)
        if not answers:
            raise BadInputError(f"{job.data} holds no answer that can be trained on")
    seconds, read = seconds * answers, 0
    for texts in corpus.extras.read:
        if texts.texts:
            of_token, tokens = _trial(partial(texts.sample, target, tokenizer))
            read = round(min(answers, tokens * len(texts.texts)))
            seconds += read * of_token
    prompts, extras = round(answers * _PROMPT_SHARE), corpus.extras
    positions = answers + read
    if any(texts.texts is None for texts in extras.read):
        positions += prompts
    stored = positions + prompts if extras.whole else positions
    parameters = recipe.parameters
    corpus_bytes = min(stored * (target.dtype.size * target.context_size + 8), job.cache_bytes)
    steps, held = job.training.steps(positions), plan(corpus_bytes)
    of_step = job.training.accumulate * _training_seconds(job, target, recipe)
    return Estimate(
        answer_tokens=answers,
        parameters=parameters,
        drafter_bytes=2 * parameters,
        corpus_bytes=corpus_bytes,
        most_bytes=job.cache_bytes,
        memory_bytes=held.most,
        steps=steps,
        writing_seconds=seconds / held.workers,
        training_seconds=steps * of_step,
    )


def _trial(read: Callable[[int], list[Text]]) -> tuple[float, float]:
    """Of texts that the target reads, so many as it is told: seconds a token, tokens a text."""
    read(1)
    began = time.monotonic()
    texts = read(_TRIED_TEXTS)
    tokens = sum(len(text.answer) for text in texts)
    return (time.monotonic() - began) / max(1, tokens), tokens / max(1, len(texts))


def plain_seconds(target: Target) -> float:
    """Of one token of plain decoding."""

    def seconds(tokens: int) -> float:
        began = time.monotonic()
        write_answers(target, [[1] * _PROMPT_TOKENS], [], tokens)
        return time.monotonic() - began

    seconds(1)  # warms up
    short = seconds(1)
    long = seconds(1 + _PLAIN_TOKENS)
    return max(long - short, _LEAST_SHARE * long) / _PLAIN_TOKENS


def _writing_seconds(job: TrainingJob, room: int | None, target: Target) -> float:
    """For one answer token, prompts included, in one process."""
    writing = job.writing
    prompts = [[1] * _PROMPT_TOKENS] * (writing.batch // len(writing.openings) or 1)
    openings = (0,) * len(writing.openings)

    def seconds(asked: list[list[int]], tokens: int) -> float:
        began = time.monotonic()
        write_answers(target, asked, [], tokens, openings=openings, room=room)
        return time.monotonic() - began

    first, long = seconds(prompts, 1), seconds(prompts, 1 + _TRIED_TOKENS)
    short = min(first, seconds(prompts, 1))  # the first one compiled
    of_column = max(long - short, _LEAST_SHARE * long) / _TRIED_TOKENS
    turns = writing.own_share * _TURNS / len(openings)  # of an answer
    columns = writing.max_answer_tokens + turns * _TURN_TOKENS
    total = short + of_column * columns
    return total / (writing.batch * writing.max_answer_tokens)


def _training_seconds(job: TrainingJob, target: Target, recipe: Recipe) -> float:
    """For one batch, forward and backward."""
    student = recipe.blank(target, job.training)
    learner, loss = Learner(student, job.training, 1), student.trial()
    learner.step([loss])
    began = time.monotonic()
    learner.step([loss])
    return time.monotonic() - began
