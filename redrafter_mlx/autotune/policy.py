"""The policy of one sequence alone: `BatchPolicy` as the loop of a single answer asks it."""

from __future__ import annotations

from dataclasses import dataclass

from redrafter_mlx.autotune.acceptance import AcceptanceStatistics
from redrafter_mlx.autotune.batch_policy import BatchPolicy
from redrafter_mlx.autotune.cost_model import CostModel
from redrafter_mlx.autotune.step_times import StepTimes
from redrafter_mlx.config import BeamShape
from redrafter_mlx.decoding.copies import CopyPlan
from redrafter_mlx.decoding.step_result import StepResult
from redrafter_mlx.drafting.prompt_lookup import CopySource


@dataclass(eq=False)
class _OnlyRow:
    committed: int = 0
    index: CopySource | None = None
    learns: bool = True


class ShapePolicy:
    """The shapes of one answer, step by step.

    batch: what chooses them
    """

    def __init__(
        self,
        costs: CostModel,
        acceptance: AcceptanceStatistics | None = None,
        times: StepTimes | None = None,
    ) -> None:
        self.batch = BatchPolicy(costs, acceptance, times)
        self._row = _OnlyRow()

    @property
    def acceptance(self) -> AcceptanceStatistics:
        return self.batch.acceptance

    def next_shape(self, length: int) -> BeamShape:
        self._row.committed = length
        return self.batch.next_shape([self._row])

    def plan_copies(self, source: CopySource, drafted: BeamShape, drawn: bool) -> CopyPlan | None:
        self._row.index = source
        return self.batch.plan_copies([self._row], [drafted], [drawn])[0]

    def learn(self, step: StepResult) -> None:
        self.batch.learn([self._row], [step])
