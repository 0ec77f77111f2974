"""Runs of `train` with tiny models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import mlx.nn as nn
import pytest
from command_line import CommandLine, Shown
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import save_model
from tiny import byte_model, byte_tokenizer, random_model

from redrafter_mlx.distill.report.metrics import read_metrics

Keys = dict[str, dict[str, object]]

SMALL: Keys = {
    "": {"answer_tokens": 600, "workers": 1, "timed_questions": 0, "cache_bytes": 40 * 10**9},
    "writing": {"own_share": 0.0, "batch": 15, "openings": [0], "max_answer_tokens": 40},
    "drafter": {"draft_vocab": 100, "layers": 1, "context_layers": [0, 1]},
    "training": {"batch": 32, "draft_length": 3, "evaluations": 1, "epochs": 2},
}
"""Options of a run of a few seconds: four blocks of prompts, one of them held out."""


def save_folder(
    path: Path,
    kind: str = "llama",
    model: nn.Module | None = None,
    tokenizer: TokenizerWrapper | None = None,
) -> Path:
    """Write a tiny model's folder as `mlx_lm.convert` does."""
    if model is None:
        model = random_model(kind, vocab_size=258) if kind != "llama" else byte_model()
    words = (tokenizer or byte_tokenizer())._tokenizer
    path.mkdir()
    save_model(path, model)
    config = {**vars(model.args), "eos_token_id": words.eos_token_id}
    plain = {k: v for k, v in config.items() if isinstance(v, (int, float, str, bool, dict))}
    (path / "config.json").write_text(json.dumps(plain))
    words.save_pretrained(path)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_folder(tmp_path / "model")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"Question number {i}?" for i in range(60)))
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))


def options_file(path: Path, keys: Keys) -> Path:
    """Write an options file: SMALL, overridden by these keys; None leaves a key out."""
    lines = []
    for table in SMALL:
        own = {**SMALL[table], **keys.get(table, {})}
        lines += [f"[{table}]"] if table else []
        lines += [f"{key} = {json.dumps(value)}" for key, value in own.items() if value is not None]
    path.write_text("\n".join(lines))
    return path


def arguments(model: Path, prompts: Path, output: Path, keys: Keys | None = None) -> list[str]:
    """Return the arguments of `train` on a file of prompts, with an options file per output."""
    config = options_file(model.parent / f"{output.name}.toml", keys or {})
    return [
        "train", "--config", str(config), "--model", str(model), "--output", str(output),
        "--prompts", str(prompts),
    ]  # fmt: skip


def unwrapped(captured: str) -> str:
    """Return captured text on one line, independent of its wrapping."""
    return " ".join(captured.split())


@dataclass(frozen=True)
class TrainCommand:
    """`redrafter-mlx train` for a model on a file of prompts, with SMALL and further options."""

    model: Path
    prompts: Path
    cli: CommandLine

    def run(self, output: Path, *more: str, keys: Keys | None = None) -> Shown:
        """Return what a run prints that ends well."""
        return self.cli.run(*arguments(self.model, self.prompts, output, keys), *more)

    def refused(self, output: Path, *more: str, keys: Keys | None = None) -> str:
        """Return the error of a run that is refused, on one line."""
        line = arguments(self.model, self.prompts, output, keys)
        return unwrapped(self.cli.run(*line, *more, status=1).err)


@pytest.fixture
def train(model: Path, prompts: Path, cli: CommandLine) -> TrainCommand:
    return TrainCommand(model, prompts, cli)


@dataclass(frozen=True)
class Disk:
    """The disk as training sees it, of a size that a test sets."""

    monkeypatch: pytest.MonkeyPatch

    def has(self, nbytes: float) -> None:
        """Let so many bytes be free beside those that training never uses."""
        free = SimpleNamespace(free=100_000_000 + nbytes)
        self.monkeypatch.setattr(
            "redrafter_mlx.runtime.files.paths.shutil.disk_usage", lambda _: free
        )


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def losses(folder: Path) -> list[float]:
    """Return the loss of each step that a run's log holds."""
    return [record["loss"] for record in read_metrics(folder) if record["event"] == "step"]


def steps_logged(folder: Path) -> list[int]:
    """Return the number of each step that a run's log holds."""
    return [record["step"] for record in read_metrics(folder) if record["event"] == "step"]


def refuse_system_messages(tokenizer: TokenizerWrapper) -> None:
    tokenizer._tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + tokenizer.chat_template
    )
