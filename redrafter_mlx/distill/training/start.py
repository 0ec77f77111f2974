"""What a training run begins with: a fresh drafter, or one that has learnt before."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.corpus.examples import choose_vocabulary, places
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.training.learner import (
    context_size,
    embedding_size,
    initialise,
    logit_size,
)
from redrafter_mlx.drafting.checkpoint import WEIGHTS, check_trained_for, load_drafter, read_config
from redrafter_mlx.drafting.recurrent import Drafter
from redrafter_mlx.drafting.recurrent_config import DrafterConfig
from redrafter_mlx.errors import DamagedFileError, MismatchError
from redrafter_mlx.target.model import Target

_NOT_FORM = (
    "target", "target_fingerprint", "draft_length",
)  # fmt: skip
"""Keys of a drafter that may differ from those of the drafter it begins with."""


def check_start(folder: Path, wanted: DrafterConfig) -> str:
    """Whether the drafter in a folder can go on as one of the wanted form; its weights' digest.

    Raises:
      ModelNotFoundError, DamagedFileError: as `read_config`
      MismatchError: naming the key in which their forms differ, or the target it was trained for
    """
    given = read_config(folder)
    check_trained_for(given, folder, wanted.target, wanted.target_fingerprint)
    for key in (field.name for field in fields(DrafterConfig) if field.name not in _NOT_FORM):
        if getattr(given, key) != getattr(wanted, key):
            raise MismatchError(
                f"{folder} has {key} {getattr(given, key)}, and {getattr(wanted, key)} is asked "
                f"for; a drafter goes on learning in its own form"
            )
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise DamagedFileError(f"{weights} is missing; a drafter's folder holds {WEIGHTS}")
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def fresh_drafter(
    config: DrafterConfig, target: Target, counts: np.ndarray, texts: Sequence[Text], seed: int
) -> Drafter:
    """A drafter that has learnt nothing, its inputs scaled to what is in a corpus.

    counts: [V], how often each token is a label; the most frequent can be drafted
    texts:  some of the corpus
    seed:   of its weights
    """
    drafter = Drafter.fresh(config, seed)
    if config.draft_vocab_size is not None:
        drafter.draft_vocab = mx.array(choose_vocabulary(counts, config.draft_vocab_size))
    seen = places(texts, 1).states
    tokens = None if config.draft_vocab_size is None else drafter.draft_vocab
    initialise(
        drafter, context_size(seen), embedding_size(target, counts), logit_size(target, tokens)
    )
    mx.eval(drafter.parameters())
    return drafter


def taught_drafter(folder: Path, target: Target) -> Drafter:
    """The drafter in a folder, which `check_start` let pass, to go on learning."""
    drafter = load_drafter(folder, target)
    drafter.set_dtype(mx.float32)
    drafter.train()
    mx.eval(drafter.parameters())
    return drafter
