"""The batches of running answers: those that are decoded in the same way share one."""

from __future__ import annotations

from collections.abc import Sequence

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.pipeline import Pipeline
from redrafter_mlx.decoding.proposal import FixedPolicy, Policy
from redrafter_mlx.engine.request import Answer
from redrafter_mlx.speculation.tree import Pack
from redrafter_mlx.tuning.policy import TunedPolicy
from redrafter_mlx.tuning.tuner import Tuner

BatchKey = tuple[BeamShape | None, bool, Pack, SamplingParams | None]
"""What the answers of a batch have in common: `Answer.shape`, the option `draft`, how trees are
packed, and the sampling parameters that drafts are drawn with for rejection; None if they are not
drawn."""


class Batches:
    """The batches of one engine, each with the policy that chooses its shapes.

    pipelines: of each batch, in the order in which they began
    """

    def __init__(self, tuning: Tuner | None) -> None:
        self._tuning = tuning
        self.pipelines: dict[BatchKey, Pipeline] = {}
        self._policies: dict[BatchKey, TunedPolicy] = {}  # of batches without a fixed shape

    def batch_of(self, answer: Answer) -> Pipeline:
        """Return the batch that an answer joins, a new one if there is none yet."""
        options, decoder = answer.request.options, answer.decoder
        drawn = decoder.sampling if decoder.draws else None
        key = (answer.shape, options.draft, decoder.pack, drawn)
        if key not in self.pipelines:
            shapes: Policy = FixedPolicy(decoder.shape)
            if answer.shape is None and self._tuning is not None:
                shapes = self._policies[key] = self._tuning.policy(options.method)
            self.pipelines[key] = Pipeline(decoder, shapes)
        elif key in self._policies:
            self._policies[key].begin_answer()
        return self.pipelines[key]

    def remove_unused(self, used: Sequence[Pipeline]) -> list[TunedPolicy]:
        """Remove all batches but these; return the policies that have learned from the others."""
        empty = [key for key, batch in self.pipelines.items() if batch not in used]
        for key in empty:
            del self.pipelines[key]
        return [self._policies.pop(key) for key in empty if key in self._policies]
