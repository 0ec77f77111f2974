"""`bench --paper` in tests: a tiny model in place of every other, and two short questions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from tiny import byte_model, byte_tokenizer, random_drafter, tiny_source

from redrafter_mlx.cli import options
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.recurrent import save_drafter
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter

SOURCE = tiny_source()
ONCE = ["--limit", "1", "-r", "1", "--warmup", "0"]


def tiny_redrafter(drafter: str = "random") -> Redrafter:
    """Return a tiny model with the drafter in this folder, or a random one for any other name."""
    model, tokenizer = byte_model(), byte_tokenizer()
    folder = Path(drafter.removesuffix("+lookup"))
    if not folder.is_dir():
        drafts = random_drafter(seed=1, vocab_size=258)
        return Redrafter(model, tokenizer, drafts, source=SOURCE)
    host = (Lookup(3),) if drafter.endswith("+lookup") else ()
    return Redrafter(
        model, tokenizer, DrafterFolder(folder, SOURCE), host_drafters=host, source=SOURCE
    )


@pytest.fixture(autouse=True)
def loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load a tiny model in place of every other one."""
    monkeypatch.setattr(
        options, "load_model", lambda asked, *_, **__: tiny_redrafter(asked.drafter)
    )


@pytest.fixture
def questions(tmp_path: Path) -> list[str]:
    """Return options for two short questions, which are answered quickly."""
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "one", "dataset": "helpful"}\n{"prompt": "two and more"}\n')
    return ["--questions", str(path), "--max-tokens", "6", "--dtype", "float32"]


Paper = Callable[..., dict[str, Any]]
"""Measures a paper's table, and returns what is printed as JSON."""


@pytest.fixture
def paper(cli: CommandLine) -> Paper:
    return lambda *arguments: cli.json("bench", "--paper", *arguments, "--json")


def columns(table: dict[str, Any], *names: str) -> list[tuple[str, ...]]:
    at = [table["columns"].index(name) for name in names]
    return [tuple(row[i] for i in at) for row in table["rows"]]


def trained_folder(folder: Path, labels: str, learning_rate: float) -> str:
    save_drafter(random_drafter(seed=2, vocab_size=258), folder)
    (folder / "train.toml").write_text(
        f'data = "x"\nlabels = "{labels}"\n[drafter]\nform = "recurrent"\n'
        f"[training]\nlearning_rate = {learning_rate}\n"
    )
    return str(folder)
