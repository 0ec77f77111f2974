"""What to say of greedy answers that are not the baseline's, and whether they may be so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from redrafter_mlx.bench.analyse.summary import WHOLE, Row
from redrafter_mlx.bench.measure.machine import LoadedModel


class Verdict(NamedTuple):
    """Lines to print, and whether something is wrong: tokens differ where float32 promises them."""

    notes: list[str]
    failed: bool


def judge(rows: Sequence[Row], models: Sequence[LoadedModel]) -> Verdict:
    """Our own greedy rows against the baseline; mlx-lm's speculative ones are only marked."""
    notes, failed = [], False
    for model in {model.dtype: model for model in models}.values():
        differing = [
            r for r in rows
            if r.category == WHOLE and r.dtype == model.dtype and r.matches_baseline is False
            and r.method in ("redrafter", "autoregressive")
        ]  # fmt: skip
        if not differing:
            continue
        share = min(r.agreeing for r in differing if r.agreeing is not None)
        rows_are = "1 row has" if len(differing) == 1 else f"{len(differing)} rows have"
        count = f"{model.dtype}: {rows_are} other tokens than mlx-lm"
        if model.exact:
            failed = True
            notes.append(f"{count}, in float32, where they must be; please report it")
        else:
            precision = (
                "TF32 products (MLX_ENABLE_TF32=0 ends them)"
                if model.tf32
                else ("reduced precision")
            )
            notes.append(
                f"{count}; at least {share:.2%} agree up to the first difference of each answer. "
                f"In {precision} nearly tied tokens can swap: `redrafter-mlx verify` says "
                f"whether that explains every difference"
            )
    return Verdict(notes, failed)
