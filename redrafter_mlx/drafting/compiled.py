"""Drafting as a compiled graph: compiled once for every size, called from then on."""

from __future__ import annotations

import mlx.core as mx

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.interface import DraftInput, Proposer, SamplingProposer
from redrafter_mlx.speculation.tree import Beams
from redrafter_mlx.target.compiled import replayed


class TracedProposer:
    """A proposer whose drafts depend on what it is given and on nothing else, as a replayed trace.

    What it draws for rejection is built anew each time.
    """

    def __init__(self, proposer: Proposer) -> None:
        def build(
            context: mx.array,
            root: mx.array,
            position: mx.array,
            sizes: tuple[int, int],
        ) -> tuple[mx.array, mx.array, mx.array]:
            beams = proposer.propose(DraftInput(context, root, position), BeamShape(*sizes))
            return beams.tokens, beams.log_probs, beams.goes_on_from

        self._proposer = proposer
        self._replay = replayed(build)

    @property
    def reads_context(self) -> tuple[int, ...]:
        return self._proposer.reads_context

    def propose(self, given: DraftInput, shape: BeamShape) -> Beams:
        return Beams(*self._replay(*given, (shape.width, shape.length)))


class TracedSamplingProposer(TracedProposer):
    """The same of a proposer that can draw."""

    def __init__(self, proposer: SamplingProposer) -> None:
        super().__init__(proposer)
        self.draw = proposer.draw


def traced_proposer(proposer: Proposer) -> Proposer:
    if isinstance(proposer, SamplingProposer):
        return TracedSamplingProposer(proposer)
    return TracedProposer(proposer)
