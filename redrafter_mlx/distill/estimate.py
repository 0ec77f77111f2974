"""What a training run will take, before it is begun."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from mlx.utils import tree_flatten

from redrafter_mlx.distill.corpus import Text
from redrafter_mlx.distill.examples import places
from redrafter_mlx.distill.extras import Extras
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.learner import Learner
from redrafter_mlx.distill.rows import read_rows
from redrafter_mlx.distill.writing import write_answers
from redrafter_mlx.drafter import Drafter
from redrafter_mlx.target import Target

_TRIED_TOKENS = 6
_PROMPT_TOKENS = 64
_ANSWER_TOKENS = 128

_TURNS, _TURN_TOKENS = 1.3, 64
"""Turns drawn for one prompt that the target writes itself, as some are left out; tokens of one."""

_PROMPT_SHARE = 0.5
"""Tokens of prompts that are learnt from, of the answers'; a prompt may have several."""

_READ_SHARE = 1.0
"""Tokens of texts that are only read, of the answers', while there are texts."""


@dataclass(frozen=True)
class Estimate:
    """Counts, bytes and seconds; seconds are from a short trial on this machine.

    corpus_bytes:  hidden states and tokens on disk
    drafter_bytes: of the stored weights
    memory_bytes:  most at once: target, a batch being written or learnt from, states
    """

    parameters: int
    drafter_bytes: int
    corpus_bytes: int
    memory_bytes: int
    steps: int
    writing_seconds: float
    training_seconds: float


def estimate(job: TrainingJob, target: Target, model_bytes: int, workers: int) -> Estimate:
    """Try a little of both stages and multiply."""
    config = job.form.config(target, job.model, "")
    drafter = Drafter(config)
    parameters = sum(a.size for a in dict(tree_flatten(drafter.trainable_parameters())).values())
    per_token = 2 * config.context_size + 8
    if config.borrowed_layers:  # rows of the prompts too, which are about as long as the answers
        per_token += 2 * _row_bytes(target, config.borrowed_layers)
    asked = _PROMPT_SHARE if job.learn_prompts and job.training.soft_share > 0 else 0.0
    asked += _READ_SHARE if job.read else 0.0
    places = round(job.answer_tokens * (1 + asked))
    corpus_bytes = min(places * per_token, job.cache_bytes)
    steps = job.training.steps(places)
    return Estimate(
        parameters=parameters,
        drafter_bytes=parameters * 2 if job.bits is None else parameters * (job.bits + 1) // 8,
        corpus_bytes=corpus_bytes,
        memory_bytes=model_bytes * workers
        + min(corpus_bytes, job.training.memory_bytes)
        + parameters * 16
        + 12 * job.training.batch * job.training.draft_length * config.output_size,
        steps=steps,
        writing_seconds=job.answer_tokens * _writing_seconds(job, target) / workers,
        training_seconds=steps * job.training.accumulate * _training_seconds(job, target, drafter),
    )


def _row_bytes(target: Target, layers: Sequence[int]) -> int:
    """Of one token in a corpus' rows."""
    nothing = Text([1], np.ones(1, np.int32), np.zeros((1, target.hidden_size), np.float16))
    return read_rows(target, layers, [nothing])[0].nbytes


def _writing_seconds(job: TrainingJob, target: Target) -> float:
    """For one answer token, prompts included, in one process."""
    rows = job.writing.batch
    prompts = [[1] * _PROMPT_TOKENS] * (rows // len(job.writing.openings) or 1)
    openings = (0,) * len(job.writing.openings)

    def seconds(tokens: int) -> float:
        began = time.monotonic()
        write_answers(target, prompts, [], tokens, openings=openings)
        return time.monotonic() - began

    seconds(1)
    short, long = seconds(1), seconds(1 + _TRIED_TOKENS)
    turns = job.writing.own_share * _TURNS / len(openings)  # of an answer
    columns = job.writing.max_answer_tokens + turns * _TURN_TOKENS
    total = short + (long - short) / _TRIED_TOKENS * columns
    layers = job.form.borrowed_of(target.n_layers)
    reading = 0.0
    if layers:
        nothing = np.zeros((_ANSWER_TOKENS, target.hidden_size), np.float16)
        text = Text([1] * _PROMPT_TOKENS, np.ones(_ANSWER_TOKENS, np.int32), nothing)
        began = time.monotonic()
        read_rows(target, layers, [text])
        reading = (time.monotonic() - began) / _ANSWER_TOKENS
    return total / (rows * job.writing.max_answer_tokens) + reading


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
