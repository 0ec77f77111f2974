"""The answers file of `bench --batch-size`: one line of JSON per run of a batch."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from redrafter_mlx.bench.measure.answers import LinesFile, Settings
from redrafter_mlx.bench.measure.batches import BatchKey, BatchMeasurement, BatchRun
from redrafter_mlx.bench.measure.methods import Method


class BatchAnswersFile:
    """Runs of batches on disk."""

    def __init__(self, path: str | Path) -> None:
        """Read the file; raises as `LinesFile` does."""
        self._file = LinesFile(path, _from_dict)

    def matching(self, settings: Settings) -> list[tuple[BatchKey, BatchRun]]:
        """Return all runs; raises BadInputError if one was made with other settings."""
        names = [field.name for field in fields(Settings)]
        for _, stored in self._file.lines:
            self._file.check(stored, settings, names)
        return [found for found, _ in self._file.lines]

    def append(self, measurement: BatchMeasurement, settings: Settings) -> None:
        """Write one run and flush it."""
        key, run = BatchKey.of(measurement.method, measurement.questions), measurement.run
        self._file.append({"batch": asdict(key), "run": asdict(run), "settings": asdict(settings)})


def _from_dict(line: dict[str, Any]) -> tuple[BatchKey, BatchRun]:
    batch = line["batch"]
    key = BatchKey(Method(**batch["method"]), tuple(batch["question_ids"]), str(batch["prompts"]))
    return key, BatchRun(**line["run"])
