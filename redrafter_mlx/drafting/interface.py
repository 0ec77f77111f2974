"""What drafts: the question it is asked, and the answers it may give."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import mlx.core as mx

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.speculation.rejection import SampledDrafts
from redrafter_mlx.speculation.tree import Beams


class DraftInput(NamedTuple):
    """All that may be known when drafts are made, on the device.

    Shapes:
      context:  [B, C], the target's hidden state behind the text before the root; C is D and as
                much again for each of the proposer's `reads_context`
      root:     [B] int32, the last token of the text
      position: [B] int32, where the root stands in the text
    """

    context: mx.array
    root: mx.array
    position: mx.array


class Proposer(Protocol):
    """Whatever drafts: the recurrent drafter, and in tests one that knows the answer.

    What it proposes may depend on the text so far and on nothing that comes later; any drafts
    whatever are then safe, for the argmax and for draws.
    """

    @property
    def reads_context(self) -> tuple[int, ...]:
        """The target's layers whose inputs it needs in `DraftInput.context`."""
        ...

    def propose(self, given: DraftInput, shape: BeamShape) -> Beams:
        """Candidates that start with the root."""
        ...


@runtime_checkable
class SamplingProposer(Proposer, Protocol):
    """What drafts for `--accept rejection`: it can also draw, and says from what.

    A proposer that cannot draw needs no rejection. Its drafts are certain, so each test of one
    would keep it with the target's own probability p(x), and draw again among the others if
    refused: that is one draw of the target, which `--accept sample` makes directly.
    """

    def draw(
        self, given: DraftInput, keys: mx.array, shape: BeamShape, params: SamplingParams
    ) -> SampledDrafts:
        """Candidates drawn without replacement; keys [B, 2] uint32."""
        ...
