"""Answers that can be decoded together: one batch, its decoder, and its shape policy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from redrafter_mlx.autotune.batch_policy import BatchPolicy
from redrafter_mlx.autotune.tuner import Tuner
from redrafter_mlx.config import (
    PLAIN,
    AcceptMethod,
    BeamShape,
    GenerationOptions,
    Prefixes,
    SamplingParams,
)
from redrafter_mlx.decoding.batch import Advanced, Batch
from redrafter_mlx.decoding.loop import Decoder
from redrafter_mlx.decoding.row import BatchShapes, FixedShape
from redrafter_mlx.drafting.interface import Drafter


@dataclass(frozen=True)
class GroupKey:
    """What all answers of a group have in common.

    shape: shape of the drafts in every step; None if it is chosen step by step
    drawn: sampling parameters that drafts are drawn with for rejection; None if they are not drawn
    """

    shape: BeamShape | None
    draft: bool
    prefixes: Prefixes
    drawn: SamplingParams | None

    @classmethod
    def of(
        cls, options: GenerationOptions, shape: BeamShape | None, drafter: Drafter | None
    ) -> GroupKey:
        """Return the key of an answer's group; `shape` is the shape that the answer requests."""
        draws = options.method == "rejection" and drafter is not None and drafter.can_draw
        drawn = options.sampling if draws and options.draft else None
        return cls(shape, options.draft, options.prefixes, drawn)


class Group:
    """One batch, which takes turns with the other groups on the device, step by step.

    Step costs and acceptance are learned while the group has answers, and recorded when the last
    answer has left.

    automatic: whether shapes are chosen step by step
    """

    def __init__(
        self,
        decoder: Decoder,
        shape: BeamShape | None,
        tuning: Tuner | None,
        method: AcceptMethod,
    ) -> None:
        """Begin a batch for the first answer of its group.

        shape:  that of every step; None chooses shapes step by step
        method: its acceptance statistics choose the first shapes
        """
        self.decoder, self.automatic = decoder, False
        self._tuning, self._method = tuning, method
        self._policy: BatchPolicy | None = None
        shapes: BatchShapes = FixedShape(shape or PLAIN)
        if tuning is not None and shape is None:
            self.automatic = True
            shapes = self._policy = tuning.policy(method)
        self.batch = Batch(decoder, shapes)
        self._seconds, self._steps = 0.0, 0

    def begin_answer(self) -> None:
        """Prepare for another answer while some are decoded."""
        if self._policy is not None:
            self._policy.begin_answer()

    def advance(self) -> Advanced:
        """Take one step of the batch."""
        advanced = self.batch.advance()
        seconds = [result.seconds for result in advanced.results.values()]
        if seconds and not math.isnan(seconds[0]):
            self._seconds += seconds[0]
            self._steps += 1
        return advanced

    def record(self) -> None:
        """Record what was learned, once, when the last answer has left."""
        if self._tuning is not None and self._policy is not None:
            self._tuning.record(self._method, self._policy)

    def measure(self) -> None:
        """Measure as much as the time of the recorded steps allows."""
        if self._tuning is not None and self._policy is not None:
            self._tuning.measure_a_little(self._seconds, self._steps)

    def abandon(self) -> None:
        """Record nothing, for the engine has failed."""
        if self._tuning is not None and self._policy is not None:
            self._tuning.abandon()
