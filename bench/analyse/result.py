"""The whole result, and its forms for programs: JSON, JSON lines, CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from redrafter_mlx.bench.analyse.compare import Change
from redrafter_mlx.bench.analyse.paper import PublishedTable
from redrafter_mlx.bench.analyse.summary import Row
from redrafter_mlx.bench.measure.breakdown import Breakdown
from redrafter_mlx.bench.measure.machine import LoadedModel, Machine
from redrafter_mlx.bench.measure.methods import BASELINE

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Protocol:
    """How it was measured; `questions` says which ones, in words."""

    questions: str
    asked: int
    max_tokens: int
    repeats: int
    warmup: int
    delay: float
    seed: int
    draft_model: str | None


@dataclass(frozen=True)
class Result:
    """All that one `bench` found out.

    interrupted: Ctrl-C came before everything was measured
    notes:       lines that must stand beside the figures
    paper:       tables to show beside ours
    """

    machine: Machine
    models: tuple[LoadedModel, ...]
    protocol: Protocol
    rows: tuple[Row, ...]
    breakdowns: tuple[Breakdown, ...]
    interrupted: bool
    notes: tuple[str, ...]
    paper: tuple[PublishedTable, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """As `-o json` prints it."""
        found: dict[str, object] = {
            "machine": asdict(self.machine),
            "models": [asdict(m) for m in self.models],
            "protocol": asdict(self.protocol),
            "baseline": BASELINE,
            "interrupted": self.interrupted,
            "notes": list(self.notes),
            "rows": [asdict(row) for row in self.rows],
            "breakdown": [asdict(b) for b in self.breakdowns],
        }
        if self.paper:
            found["paper"] = [table.to_dict() for table in self.paper]
        return found

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def to_jsonl(self) -> str:
        """A row a line, each with the machine's and the model's fields."""
        rows = self.to_dict()["rows"]
        assert isinstance(rows, list)
        return "\n".join(json.dumps({**row, **self._origin(str(row["dtype"]))}) for row in rows)

    def to_csv(self) -> str:
        """A row a line under a header; a spread is three columns, `tps_median` and so on."""
        flat = [{**_flat(asdict(row)), **self._origin(row.dtype)} for row in self.rows]
        out = io.StringIO()
        if flat:
            writer = csv.DictWriter(out, list(flat[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(flat)
        return out.getvalue().rstrip("\n")

    def _origin(self, dtype: str) -> dict[str, Value]:
        """What a row belongs to."""
        model = next((m for m in self.models if m.dtype == dtype), None)
        loaded = {} if model is None else {k: v for k, v in asdict(model).items() if k != "dtype"}
        return {**asdict(self.machine), **loaded, "max_tokens": self.protocol.max_tokens}


def changes_to_json(changes: list[Change]) -> str:
    """As `--compare -o json` prints them."""
    return json.dumps(
        {"changes": [{**asdict(c), "certain": c.certain, "verdict": c.verdict} for c in changes]}
    )


_SPREADS = ("tps", "speedup", "tokens_per_step", "first_token")
_PERCENTILES = ("nodes_before", "nodes_after")


def _flat(row: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in row.items():
        if name in _SPREADS or name in _PERCENTILES:
            keys = ("p1", "median", "p99") if name in _PERCENTILES else ("median", "low", "high")
            held = value if isinstance(value, dict) else {}
            flat.update({f"{name}_{key}": held.get(key) for key in keys})
        elif name == "acceptance":
            assert isinstance(value, tuple)
            flat[name] = " ".join(repr(share) for share in value)
        elif name == "shapes":
            assert isinstance(value, tuple)
            flat[name] = " ".join(f"{W}x{L}:{share!r}" for W, L, share in value)
        else:
            flat[name] = value
    return flat
