"""Runs of `train` with tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import save_model
from tiny import (
    byte_model,
    byte_tokenizer,
    random_model,
)

Keys = dict[str, dict[str, object]]


SMALL: Keys = {
    "": {"answer_tokens": 600, "workers": 1, "timed_questions": 0, "cache_bytes": 40 * 10**9},
    "writing": {"own_share": 0.0, "batch": 15, "openings": [0], "max_answer_tokens": 40},
    "drafter": {"draft_vocab": 100, "layers": 1, "context_layers": [0, 1]},
    "training": {"batch": 32, "draft_length": 3, "evaluations": 1, "epochs": 2},
}
"""Options of a run of a few seconds: four blocks of prompts, one of them held out."""


def save_folder(path: Path, kind: str = "llama", model: nn.Module | None = None) -> Path:
    """Write a tiny model's folder as `mlx_lm.convert` does."""
    if model is None:
        model = random_model(kind, vocab_size=258) if kind != "llama" else byte_model()
    path.mkdir()
    save_model(path, model)
    config = {**vars(model.args), "eos_token_id": 256}
    plain = {k: v for k, v in config.items() if isinstance(v, (int, float, str, bool, dict))}
    (path / "config.json").write_text(json.dumps(plain))
    byte_tokenizer()._tokenizer.save_pretrained(path)
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


def refuse_system_messages(tokenizer: TokenizerWrapper) -> None:
    tokenizer._tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + tokenizer.chat_template
    )
