"""What a training run will take, before it is begun."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.distill.corpus.examples import places
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.generation import write_answers
from redrafter_mlx.distill.corpus.reader import Reader
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.corpus.workers import CorpusJob
from redrafter_mlx.distill.corpus.writer import Writer
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.memory_plan import MemoryPlan, drafter_parameters
from redrafter_mlx.distill.training.learner import Learner
from redrafter_mlx.drafting.recurrent import Drafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.target.model import Target

_TRIED_TOKENS = 6
_PROMPT_TOKENS = 64
_ANSWER_TOKENS = 128

_TURNS, _TURN_TOKENS = 1.3, 64
"""Turns drawn for one prompt that the target writes itself, as some are left out; tokens of one."""

_PROMPT_SHARE = 0.5
"""Tokens of prompts that are learnt from, of the answers'; a prompt may have several."""

_READ_SHARE = 1.0
"""Tokens of texts that are only read, of the answers', while there are texts."""

_TRIED_TEXTS = 4
"""Given texts that are read to see how long reading takes."""


@dataclass(frozen=True)
class Estimate:
    """Counts, bytes and seconds; seconds are from a short trial on this machine.

    answer_tokens: those asked for; of given answers no more than there are
    corpus_bytes:  hidden states and tokens on disk
    drafter_bytes: of the stored weights
    memory_bytes:  most at once: target, a batch being written or learnt from, states
    """

    answer_tokens: int
    parameters: int
    drafter_bytes: int
    corpus_bytes: int
    memory_bytes: int
    steps: int
    writing_seconds: float
    training_seconds: float


def estimate(
    job: TrainingJob,
    corpus: CorpusJob,
    target: Target,
    tokenizer: TokenizerWrapper,
    plan: Callable[[int], MemoryPlan],
) -> Estimate:
    """Try a little of both stages and multiply.

    plan: what the run holds in memory, for a corpus of so many bytes

    Raises BadInputError, naming the file, for given conversations without an answer to learn from.
    """
    answers, answer_seconds = _answers(job, corpus, corpus.source(target, tokenizer), target)
    read, read_seconds = _read_texts(answers, corpus.extras, target, tokenizer)
    config = job.drafter.config(target, job.model, "")
    parameters = drafter_parameters(config)
    bits = job.drafter.bits
    per_token = target.dtype.size * config.context_size + 8
    asked = _PROMPT_SHARE if job.learn_prompts and job.training.soft_share > 0 else 0.0
    places = round(answers * (1 + asked)) + read
    corpus_bytes = min(places * per_token, job.cache_bytes)
    steps = job.training.steps(places)
    held = plan(corpus_bytes)
    return Estimate(
        answer_tokens=answers,
        parameters=parameters,
        drafter_bytes=parameters * 2 if bits is None else parameters * (bits + 1) // 8,
        corpus_bytes=corpus_bytes,
        memory_bytes=held.most,
        steps=steps,
        writing_seconds=(answer_seconds + read_seconds) / held.workers,
        training_seconds=steps
        * job.training.accumulate
        * _training_seconds(job, target, Drafter(config)),
    )


def _answers(
    job: TrainingJob, corpus: CorpusJob, source: Writer | Reader, target: Target
) -> tuple[int, float]:
    """Answer tokens that the corpus will hold, and seconds for them in one process."""
    if isinstance(source, Writer):
        seconds = job.answer_tokens * _writing_seconds(job, corpus.room, target)
        return job.answer_tokens, seconds
    there = source.count_tokens(job.answer_tokens)
    if not there:
        raise BadInputError(f"{job.data} holds no answer that can be learnt from")
    of_one, _ = _seconds_a_token(source.read_some)
    return there, there * of_one


def _read_texts(
    answers: int, extras: Extras, target: Target, tokenizer: TokenizerWrapper
) -> tuple[int, float]:
    """Tokens of texts that are only read beside so many of answers, and seconds for them."""
    tokens, seconds = 0, 0.0
    for foreign in extras.foreign:
        if foreign.texts:
            of_one, in_one = _seconds_a_token(partial(foreign.read_some, target, tokenizer))
            read = round(min(answers * _READ_SHARE, in_one * len(foreign.texts)))
            tokens, seconds = tokens + read, seconds + read * of_one
    return tokens, seconds


def _seconds_a_token(read: Callable[[int], list[Text]]) -> tuple[float, float]:
    """Of texts that the target reads, so many as it is told: seconds for a token, tokens in one."""
    read(1)
    began = time.monotonic()
    texts = read(_TRIED_TEXTS)
    tokens = sum(len(text.answer) for text in texts)
    return (time.monotonic() - began) / max(1, tokens), tokens / max(1, len(texts))


def _writing_seconds(job: TrainingJob, room: int | None, target: Target) -> float:
    """For one answer token, prompts included, in one process."""
    rows = job.writing.batch
    prompts = [[1] * _PROMPT_TOKENS] * (rows // len(job.writing.openings) or 1)
    openings = (0,) * len(job.writing.openings)

    def seconds(tokens: int) -> float:
        began = time.monotonic()
        write_answers(target, prompts, [], tokens, openings=openings, room=room)
        return time.monotonic() - began

    seconds(1)
    short, long = seconds(1), seconds(1 + _TRIED_TOKENS)
    turns = job.writing.own_share * _TURNS / len(openings)  # of an answer
    columns = job.writing.max_answer_tokens + turns * _TURN_TOKENS
    total = short + (long - short) / _TRIED_TOKENS * columns
    return total / (rows * job.writing.max_answer_tokens)


def _training_seconds(job: TrainingJob, target: Target, drafter: Drafter) -> float:
    """For one batch, forward and backward."""
    P, T = job.training.batch, job.training.draft_length
    rng = np.random.default_rng(0)
    answers = -(-P // _ANSWER_TOKENS)
    texts = [
        Text(
            [1] * _PROMPT_TOKENS,
            rng.integers(0, target.vocab_size, _ANSWER_TOKENS, dtype=np.int32),
            rng.normal(size=(_ANSWER_TOKENS, target.hidden_size)).astype(np.float16),
        )
        for _ in range(answers)
    ]
    texts = Extras.of(drafter.config).read(target, texts)
    batch = places(texts, T).batch(0, P)
    learner = Learner(drafter, target, job.training, 1)
    learner.learn([batch])
    began = time.monotonic()
    learner.learn([batch])
    return time.monotonic() - began
