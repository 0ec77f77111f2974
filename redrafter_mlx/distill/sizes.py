"""The size of a training run on disk and in memory, by arithmetic: the target is never called."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.distill.corpus.folder import CorpusGauge, CorpusGoal, CorpusJob
from redrafter_mlx.distill.corpus.read_texts import ReadTexts
from redrafter_mlx.distill.corpus.reader import Reader
from redrafter_mlx.distill.corpus.writing.writer import Writer
from redrafter_mlx.distill.forms.form import Recipe
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.memory_plan import PROMPT_TOKENS, MemoryPlan
from redrafter_mlx.distill.training.learner import checkpoint_bytes
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files.paths import (
    NoRoomError,
    bytes_below,
    check_free_disk,
    free_disk,
    same_disk,
)
from redrafter_mlx.target_model.model import Target

_ANSWER_SHARE = 2 / 3
"""Mean length of the answers that the target writes, as a share of the maximum."""

_PROMPT_SHARE = 0.5
"""Prompt tokens that are trained on, per answer token; a prompt may have several answers."""


@dataclass(frozen=True)
class Sizes:
    """Counts and bytes of a training run, from arithmetic alone."""

    answer_tokens: int  # the requested number; of given answers, no more than there are
    parameters: int
    drafter_bytes: int  # size of the stored weights
    training_bytes: int  # what training will still write to disk, see `training_bytes`
    corpus_bytes: int  # hidden states and tokens of all answer tokens on disk
    max_bytes: int  # maximum size of the corpus on disk: the run's, or what there is room for
    memory_bytes: int  # peak: target, a batch being written or trained on, states
    steps: int
    workers: int = 1  # processes that write


def sizes(
    corpus: CorpusJob,
    recipe: Recipe,
    target: Target,
    tokenizer: TokenizerWrapper,
    plan: Callable[[int], MemoryPlan],
) -> Sizes:
    """Size up a run without a call of the target, whose weights need not be in memory.

    plan: returns the memory plan of the run for a corpus of this many bytes
    Raises BadInputError, naming the file, if given conversations have no usable answer.
    """
    job, source = corpus.job, corpus.source(target, tokenizer)
    answers, read, stored = _demand(corpus, source, target, tokenizer, job.answer_tokens)
    if not answers:
        raise BadInputError(f"{job.data} holds no answer that can be trained on")
    saved = training_bytes(job, recipe)
    beside = saved if same_disk(corpus.folder, job.output) else 0
    room = max(0, free_disk(corpus.folder) - beside)
    max_bytes = min(corpus.max_bytes, bytes_below(corpus.folder) + room)
    held, parameters = plan(min(stored, max_bytes)), recipe.parameters
    return Sizes(
        answer_tokens=answers,
        parameters=parameters,
        drafter_bytes=2 * parameters,
        training_bytes=saved,
        corpus_bytes=stored,
        max_bytes=max_bytes,
        memory_bytes=held.peak,
        steps=job.training.steps(positions_of(corpus, answers, read) / job.training.batch),
        workers=held.workers,
    )


def _demand(
    corpus: CorpusJob,
    source: Writer | Reader,
    target: Target,
    tokenizer: TokenizerWrapper,
    answers: int,
) -> tuple[int, int, int]:
    """Return a corpus's answer tokens, up to `answers`, tokens that are only read, and bytes."""
    if isinstance(source, Reader):
        answers = source.count_tokens(answers)
    read = sum(tokens_read(corpus, t, tokenizer, answers) for t in corpus.extras.read if t.texts)
    return answers, read, stored_bytes(corpus, target, answers, read)


def tokens_read(
    corpus: CorpusJob, texts: ReadTexts, tokenizer: TokenizerWrapper, answers: int
) -> int:
    """Return how many tokens of texts are read, with a corpus of `answers` answer tokens."""
    writing, given = corpus.job.writing, texts.texts or ()
    of_block = _ANSWER_SHARE * writing.max_answer_tokens * writing.batch
    if corpus.job.data is not None:
        of_block = Reader.batch * PROMPT_TOKENS
    read = min(len(given), texts.per_block * math.ceil(answers / of_block))
    return round(read * texts.mean_length(tokenizer))


def positions_of(corpus: CorpusJob, answers: int, read: int = 0) -> int:
    """Return how many positions a corpus has; `read` are tokens of texts that are only read."""
    learns_prompts = any(texts.texts is None for texts in corpus.extras.read)
    return answers + read + learns_prompts * round(answers * _PROMPT_SHARE)


def stored_bytes(corpus: CorpusJob, target: Target, answers: int, read: int = 0) -> int:
    """Return the size of a corpus on disk; `target` reads the layers that are stored."""
    whole = corpus.extras.whole * round(answers * _PROMPT_SHARE)
    stored = positions_of(corpus, answers, read) + whole
    return stored * (target.dtype.size * target.context_size + 8)


def training_bytes(job: TrainingJob, recipe: Recipe) -> int:
    """Return what training will still write: the drafter, and twice its checkpoint."""
    needed = 2 * checkpoint_bytes(recipe, job.training) + 2 * recipe.parameters
    return max(0, needed - bytes_below(job.output))


DEFAULT_CORPUS_BYTES = 40_000_000_000
"""Maximum size of a corpus on disk if the job sets none and the disk is large."""

_DISK_SHARE = 10
"""A corpus takes at most one part in this many of the free disk, if the job sets no size."""


def default_corpus_bytes(folder: Path) -> int:
    """Return the maximum size of a corpus in a folder, for a job that sets none."""
    free = free_disk(folder) + bytes_below(folder)  # so that it does not shrink as it is written
    return min(DEFAULT_CORPUS_BYTES, max(1, free // _DISK_SHARE))


def check_disk(
    corpus: CorpusJob,
    goal: CorpusGoal,
    recipe: Recipe,
    target: Target,
    tokenizer: TokenizerWrapper,
    source: Writer | Reader,
) -> None:
    """Raise NoRoomError unless there is room for what is missing of the corpus, and to train."""
    output, size = corpus.job.output, CorpusGauge(corpus, goal).size()
    missing, saved = 0, training_bytes(corpus.job, recipe)
    if not goal.reached(size):
        # Blocks may be there without the files that other forms of drafters read.
        *_, stored = _demand(corpus, source, target, tokenizer, goal.answer_tokens)
        missing = max(0, min(stored, goal.max_bytes) - size.bytes)
    if not same_disk(corpus.folder, output):
        check_free_disk(output, saved, "--output")
        saved = 0
    try:
        check_free_disk(corpus.folder, missing + saved, "REDRAFTER_CACHE")
    except NoRoomError as error:
        raise NoRoomError(
            f"the corpus and its training: {error}, or write a smaller one (--answer-tokens, "
            f"cache_bytes)"
        ) from error
