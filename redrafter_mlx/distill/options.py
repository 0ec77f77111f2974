"""How a drafter is trained, as one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal

from redrafter_mlx.config import (
    MAX_BEAM_LENGTH,
    check_choice,
    check_int,
    check_number,
    refuse_unknown_keys,
)
from redrafter_mlx.errors import BadInputError

Optimizer = Literal["muon", "adamw"]
"""What the drafter's matrices are moved by; see `drafter_optimizer`."""


MAX_SEED = 2**32 - 1
"""Each block of a corpus has a key of its own: the seed and its number, within 64 bits."""


@dataclass(frozen=True)
class TrainOptions:
    """The optimisation; what is trained is a DrafterConfig, what from is a corpus.

    draft_length:  T, positions that are learnt behind the root (paper: 5)
    epochs:        passes over the corpus
    batch:         places in one forward and backward call
    accumulate:    such calls to one step of the optimiser
    optimizer:     muon, with AdamW for all but matrices, or adamw for everything
    learning_rate: AdamW's highest, and Muon's in proportion; they warm up and fall along a cosine
    final_rate:    what they fall to, as a share of the highest
    weight_decay:  AdamW's; Muon's matrices have none
    soft_share:    of the loss, what is learnt from the target's probabilities; the rest from its
                   choices
    depth_decay:   weight of each depth relative to the one before
    evaluations:   looks at held-out texts, evenly spread
    keep_start:    of the weights that are judged and saved, the share that training began with; the
                   rest is what was learnt (Wortsman et al., arXiv 2109.01903)
    memory_bytes:  of hidden states read at once
    """

    draft_length: int = 5
    epochs: float = 4.0
    batch: int = 1024
    accumulate: int = 1
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
    memory_bytes: int = 4_000_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("draft_length", 1, MAX_BEAM_LENGTH - 1),
            ("batch", 1, 2**20),
            ("accumulate", 1, 2**20),
            ("evaluations", 1, 1000),
            ("memory_bytes", 1, 2**50),
            ("seed", 0, MAX_SEED),
        ):
            check_int(name, getattr(self, name), least, most)
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

    def steps(self, places: int) -> int:
        """Steps of the optimiser over a corpus of so many places."""
        return max(1, round(self.epochs * places / (self.batch * self.accumulate)))

    @classmethod
    def from_dict(cls, given: Mapping[str, object]) -> TrainOptions:
        """Raises BadInputError for an unknown key, naming it."""
        refuse_unknown_keys(given, [f.name for f in fields(cls)], "training option")
        return cls(**given)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)
