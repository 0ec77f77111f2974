"""SPEED-Bench (NVIDIA, 2026): its published files have a placeholder for texts of others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.words import count

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""What a turn holds instead of a text that its authors' script fetches from the source."""

JSON_LINES = (
    'as JSON lines with pandas: read_parquet(...).to_json(..., orient="records", lines=True); '
    "see docs/guides/measuring.md"
)
"""How to write a Parquet file so that it can be read here."""

PREPARE = (
    "NVIDIA's script fetches them (`python prepare_data.py --dataset speed --config qualitative` "
    "in examples/specdec_bench of github.com/NVIDIA/Model-Optimizer); write the Parquet file that "
    f"it makes {JSON_LINES}"
)


def check_prepared(path: str | Path, questions: Iterable[Iterable[str]]) -> None:
    """Raise BadInputError if a turn of a file's questions holds the placeholder."""
    missing = sum(any(PLACEHOLDER in turn for turn in turns) for turns in questions)
    if missing:
        raise BadInputError(
            f"{path} has SPEED-Bench's placeholder in {count(missing, 'question')} instead of the "
            f"texts; {PREPARE}"
        )
