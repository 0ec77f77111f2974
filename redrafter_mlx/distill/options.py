"""Options for writing a corpus and for training a drafter on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from redrafter_mlx.checks import check_choice, check_int, check_number
from redrafter_mlx.config import MAX_BEAM_LENGTH
from redrafter_mlx.errors import BadInputError

Labels = Literal["target", "data"]
"""Labels for given answers: the target's continuations, or the answers themselves."""

Optimizer = Literal["muon", "adamw", "adamw_torch"]
"""Optimiser of the drafter's matrices; see `drafter_optimizer`."""

OPENINGS = (0, 6, 12)
"""Number of tokens drawn at random at the start of a prompt's first, second and third answer."""

MAX_SEED = 2**32 - 1
"""Maximum seed: each block of a corpus has its own key, made of the seed and the block's number
within 64 bits."""


@dataclass(frozen=True)
class WritingOptions:
    """How the target writes a corpus, block by block."""

    own_share: float = 1.0  # share of the blocks whose prompts the target writes itself
    starter_share: float = 0.75  # share of those whose prompts continue a common prompt starter
    batch: int = 126  # number of texts written at once
    openings: tuple[int, ...] = OPENINGS  # an answer each: tokens drawn at random, the rest greedy
    temperature: float = 1.0  # sampling temperature for prompts that the target writes
    starter_temperature: float = 0.8  # the same after a starter, which already makes prompts differ
    opening_temperature: float = 0.7  # the same for the openings of answers
    max_answer_tokens: int = 160  # longer answers are cut
    max_prompt_tokens: int = 256  # longer prompts are left out
    thinking: bool = False  # whether a target that can reason first does so
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("own_share", "starter_share"):
            check_number(name, getattr(self, name), low=0, high=1)
        for name in ("temperature", "starter_temperature", "opening_temperature"):
            check_number(name, getattr(self, name), low=0, low_excluded=True)
        for name in ("batch", "max_answer_tokens", "max_prompt_tokens"):
            check_int(name, getattr(self, name), 1, 2**20)
        if not 1 <= len(self.openings) <= self.batch:
            raise BadInputError(
                f"openings is {[*self.openings]}; give 1 to {self.batch} numbers of tokens"
            )
        for tokens in self.openings:
            check_int("openings", tokens, 0, 2**20)
        check_int("seed", self.seed, 0, MAX_SEED)


@dataclass(frozen=True)
class TrainOptions:
    """The training of a drafter on a corpus.

    draft_length:  T, number of tokens drafted after the root (paper: 5)
    epochs:        number of passes over the corpus
    batch:         number of positions in one forward and backward call
    accumulate:    number of such calls per optimiser step; None is as of `for_size`
    optimizer:     muon, with AdamW for all but matrices; adamw for everything; or adamw_torch, the
                   same with PyTorch's betas and bias correction
    learning_rate: AdamW's peak learning rate; Muon's is proportional. Both warm up, then decay
                   along a cosine
    final_rate:    final learning rate, as a share of the peak
    warmup_share:  share of the steps in which the learning rate rises from 0
    weight_decay:  AdamW's; Muon's matrices have none
    clip:          largest norm of the gradients; longer ones are scaled down to it
    soft_share:    share of the soft labels (the target's probabilities) in the loss; hard labels
                   (its tokens) have the rest
    depth_decay:   weight of each depth relative to the depth before it
    evaluations:   number of evaluations on held-out texts, evenly spaced
    keep_start:    interpolate the weights that are evaluated and saved with the weights that
                   training started from, which get this share (Wortsman et al., arXiv 2109.01903)
    """

    draft_length: int = 5
    epochs: float = 4.0
    batch: int = 1024
    accumulate: int | None = None
    optimizer: Optimizer = "muon"
    learning_rate: float = 1e-3
    final_rate: float = 0.1
    warmup_share: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    soft_share: float = 0.5
    depth_decay: float = 0.8
    evaluations: int = 10
    keep_start: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, minimum, maximum in (
            ("draft_length", 1, MAX_BEAM_LENGTH - 1),
            ("batch", 1, 2**20),
            ("evaluations", 1, 1000),
            ("seed", 0, MAX_SEED),
        ):
            check_int(name, getattr(self, name), minimum, maximum)
        if self.accumulate is not None:
            check_int("accumulate", self.accumulate, 1, 2**20)
        check_choice("optimizer", self.optimizer, Optimizer)
        for name, limit in (
            ("epochs", 1000), ("learning_rate", 1), ("clip", 1000), ("depth_decay", 1),
        ):  # fmt: skip
            check_number(name, getattr(self, name), low=0, high=limit, low_excluded=True)
        for name in ("soft_share", "warmup_share", "final_rate", "weight_decay", "keep_start"):
            check_number(name, getattr(self, name), low=0, high=1)
        if self.keep_start == 1:
            raise BadInputError("keep_start is 1.0; it must be less than 1")

    @property
    def depth_weights(self) -> list[float]:
        return [self.depth_decay**depth for depth in range(self.draft_length)]

    @property
    def batches(self) -> int:
        return self.accumulate or 1

    def for_size(self, hidden_size: int) -> TrainOptions:
        """Return the options for a target of this size, with `accumulate` filled in.

        Muon's own products grow with the cube of the hidden size, those of a batch with its square:
        at 4,096 they would be six sevenths of a step of one batch.
        """
        if self.accumulate is not None:
            return self
        many = max(1, round(hidden_size / 1024)) if self.optimizer == "muon" else 1
        return replace(self, accumulate=many)

    def steps(self, of_pass: float) -> int:
        """Return the number of optimiser steps, if one pass has this many batches."""
        return max(1, round(self.epochs * of_pass / self.batches))
