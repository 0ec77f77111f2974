"""The whole result of one `bench`, its JSON, and whether its tokens equal the baseline's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from redrafter_mlx.bench.analyse.summary import Row
from redrafter_mlx.bench.measure.machine import LoadedModel, Machine
from redrafter_mlx.bench.measure.methods import BASELINE
from redrafter_mlx.bench.measure.questions import WHOLE


@dataclass(frozen=True)
class Protocol:
    """How it was measured; `questions` describes the questions, `asked` counts them."""

    questions: str
    asked: int
    max_tokens: int
    repeats: int
    warmup: int
    delay: float
    seed: int
    draft_model: str | None
    prompt_tokens: int | None = None  # that every prompt was brought to; None if left unchanged
    ignore_eos: bool = False


@dataclass(frozen=True)
class Result:
    """The whole result of one `bench`."""

    machine: Machine
    models: tuple[LoadedModel, ...]
    protocol: Protocol
    rows: tuple[Row, ...]
    interrupted: bool  # Ctrl-C came before everything was measured
    notes: tuple[str, ...]  # lines that must be shown with the figures
    baseline: str = BASELINE  # what speedups are over

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "rows": [row.to_dict() for row in self.rows]}


class Verdict(NamedTuple):
    """Lines to print, and whether tokens differ although float32 guarantees equality."""

    notes: list[str]
    failed: bool


def judge(rows: Sequence[Row], models: Sequence[LoadedModel]) -> Verdict:
    """Judge whether our own greedy rows have the baseline's tokens; mlx-lm's drafts are not."""
    notes, failed = [], False
    for model in {model.dtype: model for model in models}.values():
        differing = [
            r for r in rows
            if r.category == WHOLE and r.dtype == model.dtype and r.matches_baseline is False
            and r.method.ours
        ]  # fmt: skip
        if not differing:
            continue
        shares = [r.agreeing for r in differing if r.agreeing is not None]
        agree = "; at least {:.2%} agree up to the first difference of each answer"
        rows_have = "1 row has" if len(differing) == 1 else f"{len(differing)} rows have"
        count = f"{model.dtype}: {rows_have} other tokens than mlx-lm"
        if model.exact:
            failed = True
            notes.append(f"{count}, in float32, where they must be equal; please report it")
            continue
        rounded = "reduced precision"
        if model.arithmetic == "float32" and model.tf32:
            rounded = "TF32 products (MLX_ENABLE_TF32=0 makes them float32)"
        notes.append(
            f"{count}{agree.format(min(shares)) if shares else ''}. "
            f"In {rounded} nearly tied tokens can swap: "
            f"`redrafter-mlx verify` says whether that explains every difference"
        )
    return Verdict(notes, failed)
