"""What a step costs before this machine has been measured, as ratios of a one-row call.

The ratios are rough: they are there so that the first answers draft with a shape that is safe on
such a machine, and nobody waits. Each is replaced as soon as it has been measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from redrafter_mlx.autotune.cost_model import CostCurves, Setup

SHORT_CONTEXT, LONG_CONTEXT = 128, 2048

_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 24, 32)

_CALL = {
    # Two threads of an AMD EPYC with MKL or OpenBLAS, float32: products of 2 to 16 rows.
    "cpu": (1.0, 1.0, 1.5, 1.55, 1.65, 1.75, 1.9, 2.1, 2.3, 2.5, 3.0, 3.6),
    # The authors of arXiv 2403.09919 on an M1 Max and an M2 Ultra, float16: 2 to 15 drafted nodes
    # cost 1.5 to 2.2 of a plain step, 16 cost 2.7 to 3.3.
    "apple": (1.0, 1.3, 1.35, 1.4, 1.45, 1.5, 1.7, 1.8, 2.0, 2.8, 3.6, 4.5),
    # Weights are read once for so many rows.
    "cuda": (1.0, 1.02, 1.03, 1.04, 1.05, 1.06, 1.1, 1.12, 1.15, 1.2, 1.3, 1.4),
}

_CONTEXT = 0.15
"""The long context makes a call so much longer."""

_DRAFT, _FURTHER_BEAM = 0.07, 0.1
"""A level of beam search with one beam, and what each further one adds to it."""

_PLAIN_REST, _CHAIN_REST, _DRAFTED_REST = 0.02, 0.04, 0.08

Timed = tuple[str, int, int]
"""What was timed: ("call", rows, 0) or ("draft", W, L)."""


def assumed_curves(
    setup: Setup, backend: str, timed: Mapping[Timed, float], widest: int
) -> CostCurves:
    """Curves from the table of a backend, and from what has been timed so far.

    Args:
      backend: "cpu", "apple" or "cuda"; another one counts as "cuda"
      timed: seconds; without those of a one-row call the unit is that call's time
      widest: most candidates that the drafter can give, 0 where nothing drafts on the device
    """
    unit = timed.get(("call", 1, 0), 1.0)
    ratios = zip(_ROWS, _CALL.get(backend, _CALL["cuda"]), strict=True)
    short = [(rows, timed.get(("call", rows, 0), unit * ratio)) for rows, ratio in ratios]
    draft = [
        (w, n, timed.get(("draft", w, n), unit * _DRAFT * (n - 1) * (1 + _FURTHER_BEAM * (w - 1))))
        for w in range(1, widest + 1)
        for n in (2, 4, 8)
    ]
    return CostCurves(
        setup=setup,
        short_context=SHORT_CONTEXT,
        long_context=LONG_CONTEXT,
        short=tuple(short),
        long=tuple((rows, seconds * (1 + _CONTEXT)) for rows, seconds in short),
        draft=tuple(draft),
        plain_rest=unit * _PLAIN_REST,
        chain_rest=unit * _CHAIN_REST,
        drafted_rest=unit * _DRAFTED_REST,
        spread=0.0,
    )


def to_time(widest: int) -> list[Timed]:
    """What is worth timing, the most telling first; what was not timed is assumed."""
    calls: list[Timed] = [("call", rows, 0) for rows in _ROWS[:-2]]
    widths = sorted({w for w in (1, 2, widest) if w <= widest})
    drafts: list[Timed] = [("draft", w, n) for w in widths for n in (2, 4)]
    return [*calls[:4], *drafts, *calls[4:]]
