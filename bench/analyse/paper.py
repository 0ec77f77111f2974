"""The published figures, for `--paper`: each as printed, with where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from redrafter_mlx.bench.analyse.summary import WHOLE, Row

PAPER = "Cheng et al., Recurrent Drafter, arXiv 2403.09919"

_PROMPT = "one prompt, 200 tokens"
"""What the paper's Macs were timed with, by its authors' code: every tokens/step of Table 2 is 200
divided by a whole number of target calls."""


@dataclass(frozen=True)
class Published:
    """One figure of a table: what was measured on what, and what came of it."""

    machine: str
    model: str
    questions: str
    method: str
    beam_width: int | None
    tps: float | None
    speedup: float
    tokens_per_step: float


@dataclass(frozen=True)
class PublishedTable:
    """A table of the paper.

    beside: which of our rows stand beside it, in words
    """

    name: str
    title: str
    source: str
    beside: str
    entries: tuple[Published, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def _by_method(
    questions: str, table: dict[str, tuple[tuple[float, float], ...]]
) -> list[Published]:
    models = ("Vicuna 7B", "Vicuna 13B", "Vicuna 33B")
    return [
        Published("H100", model, questions, method, None, None, speedup, tokens_per_step)
        for method, figures in table.items()
        for model, (speedup, tokens_per_step) in zip(models, figures, strict=True)
    ]


def _by_width(
    machine: str, model: str, figures: tuple[tuple[float, float, float], ...]
) -> list[Published]:
    return [
        Published(machine, model, _PROMPT, "ReDrafter", width, tps, speedup, tokens_per_step)
        for width, (tps, speedup, tokens_per_step) in enumerate(figures, 1)
    ]


TABLE_1 = PublishedTable(
    name="Table 1",
    title="Speedup and tokens/step by method, greedy, PyTorch on an H100",
    source=f"{PAPER}, Table 1 (section 4.1)",
    beside="every method at temperature 0",
    entries=tuple(
        _by_method(
            "MT-Bench",
            {
                "Medusa": ((2.39, 2.55), (2.40, 2.61), (2.51, 2.53)),
                "EAGLE": ((2.69, 3.96), (2.74, 4.00), (2.80, 3.71)),
                "ReDrafter": ((2.80, 4.20), (2.80, 4.21), (2.61, 3.87)),
            },
        )
        + _by_method(
            "AlpacaEval",
            {
                "Medusa": ((2.19, 2.42), (2.26, 2.45), (2.31, 2.31)),
                "EAGLE": ((2.43, 3.61), (2.49, 3.62), (2.59, 3.29)),
                "ReDrafter": ((2.69, 4.06), (2.78, 4.02), (2.43, 3.61)),
            },
        )
    ),
)

TABLE_2 = PublishedTable(
    name="Table 2",
    title="MLX on Apple Silicon by beam width, beam length 4, batch size 1",
    source=f"{PAPER}, Table 2 (section 4.2)",
    beside="beam length 4 at temperature 0",
    entries=tuple(
        _by_width(
            "M1 Max",
            "Vicuna 7B",
            ((28.22, 1.32, 2.15), (27.69, 1.30, 2.38), (27.54, 1.29, 2.44), (20.16, 0.94, 2.44)),
        )
        + _by_width(
            "M2 Ultra",
            "Vicuna 7B",
            ((57.14, 1.43, 2.15), (60.24, 1.51, 2.38), (60.40, 1.52, 2.44), (30.05, 0.75, 2.44)),
        )
        + _by_width(
            "M2 Ultra",
            "Vicuna 13B",
            ((41.94, 1.87, 2.53), (43.52, 1.94, 2.82), (43.55, 1.94, 2.82), (21.83, 0.97, 2.94)),
        )
        + _by_width(
            "M2 Ultra",
            "Vicuna 33B",
            ((1.15, 1.97, 2.17), (1.22, 2.08, 2.33), (1.28, 2.19, 2.47), (1.33, 2.28, 2.56)),
        )
    ),
)

TABLES = (TABLE_2, TABLE_1)


def rows_beside(table: PublishedTable, rows: Sequence[Row]) -> list[Row]:
    """Our rows that answer the table's question."""
    greedy = [r for r in rows if r.category == WHOLE and r.temperature == 0]
    if table is TABLE_2:
        return [r for r in greedy if r.method == "redrafter" and r.beam_length == 4]
    return greedy
