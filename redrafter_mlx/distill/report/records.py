"""What a training run found, as records: what was learnt from, what it gave, how fast it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from redrafter_mlx.distill.evaluation.acceptance import DraftQuality
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.drafting.recurrent_config import DrafterConfig
from redrafter_mlx.target.source import TargetSource

SCATTER = 0.02
"""Speedups this close to 1 are not told apart from 1: a short measurement scatters as much."""


@dataclass(frozen=True)
class CorpusReport:
    """What was learnt from.

    read_tokens: of prompts and texts that others wrote, those that were learnt from too
    own_share: of the texts, those whose prompt the target wrote itself; the rest were given
    labels:    whether the target's words were learnt, or given answers as they stand
    left_out:  texts that were filtered out: reason to count
    """

    texts: int
    answer_tokens: int
    read_tokens: int
    own_share: float
    labels: Literal["target", "data"]
    left_out: Mapping[str, int]


@dataclass(frozen=True)
class MeasuredRow:
    """Real decoding with one beam shape, timed beside auto-regression.

    nodes: the most tokens in one call of the target
    """

    beam_width: int
    beam_length: int
    nodes: int
    tokens_per_step: float
    tokens_per_second: float
    baseline_tokens_per_second: float

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.baseline_tokens_per_second


@dataclass(frozen=True)
class TrainingReport:
    """All that a card says.

    command:  the command line, as it was given
    versions: by package
    machine:  the chip and the system, on which it was trained and measured
    coverage: share of the corpus inside the draft vocabulary, None if all tokens can be drafted
    seconds:  of training, without writing the corpus
    begun_with: digest of the weights that training began with, None for a fresh drafter
    protocol: how `measured` was measured: which questions, how many tokens, how they were chosen
    """

    target: TargetSource
    command: Sequence[str]
    versions: Mapping[str, str]
    machine: str
    corpus: CorpusReport
    drafter: DrafterConfig
    training: TrainOptions
    seconds: float
    quality: DraftQuality
    measured: Sequence[MeasuredRow]
    protocol: str
    coverage: float | None = None
    begun_with: str | None = None


def verdict(measured: Sequence[MeasuredRow]) -> str:
    """One plain sentence: is it faster on this machine or not, and with which beams?"""
    if not measured:
        return "Its speed was not measured."
    best = max(measured, key=lambda row: row.speedup)
    figures = (
        f"{best.tokens_per_second:.1f} tokens a second with beam width {best.beam_width} and "
        f"length {best.beam_length}, {best.baseline_tokens_per_second:.1f} without"
    )
    if best.speedup > 1 + SCATTER:
        return f"On this machine it is faster: {best.speedup:.2f} times ({figures})."
    if best.speedup < 1 - SCATTER:
        return f"On this machine it is not faster: {best.speedup:.2f} times at best ({figures})."
    return f"On this machine it makes no difference: {best.speedup:.2f} times at best ({figures})."
