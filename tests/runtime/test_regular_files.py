"""Nothing but a file is opened where a file belongs: reading a named pipe would never end."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny import byte_model, byte_tokenizer, random_drafter

from redrafter_mlx.bench.analyse.compare import read_result
from redrafter_mlx.distill.corpus.prompts.conversations import read_rows
from redrafter_mlx.distill.options_file import read_options
from redrafter_mlx.drafting.names import parse
from redrafter_mlx.drafting.recurrent import save_drafter
from redrafter_mlx.drafting.static_trees import find_tree
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.loading.drafter import prepare_drafter
from redrafter_mlx.loading.target import load_target
from redrafter_mlx.weights.status import show_model

SECONDS = 60
"""A test that waits for a writer of its pipe ends after this many."""


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    def end(*_: object) -> None:
        raise TimeoutError("it waits for a writer")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    model = byte_model()
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(vars(model.args)))
    byte_tokenizer()._tokenizer.save_pretrained(path)
    return path


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


KINDS: dict[str, Callable[[Path], None]] = {
    "a named pipe": os.mkfifo,
    "a socket": _socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        "config.json", "generation_config.json", "model.safetensors", "model-2.safetensors",
        "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
        "tokenizer.model", "chat_template.jinja", "added_tokens.json",
    ],
)  # fmt: skip
def test_of_a_models_folder(
    folder: Path, name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket may have few characters
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](Path("model") / name)
    with pytest.raises(RedrafterError, match=f"{name} cannot be read: it is {kind}, not a file"):
        load_target(folder)
    with pytest.raises(RedrafterError, match="it is a"):
        show_model(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "drafter.bin"])
def test_of_a_drafters_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "drafter"
    save_drafter(random_drafter(), folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name == "drafter.bin":  # which stands beside the weights
        assert prepare_drafter(parse(folder)).parts == (str(folder),)
        return
    with pytest.raises(RedrafterError, match=r"config\.json|model\.safetensors"):
        prepare_drafter(parse(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_that_a_user_names(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("odd.gguf")
    KINDS[kind](path)
    readers: list[Callable[[], object]] = [
        lambda: load_target(path),
        lambda: show_model(path),
        lambda: find_tree(str(path)),
        lambda: read_rows(path),
        lambda: read_options(path),
        lambda: read_result(path),
    ]
    for read in readers:
        with pytest.raises(RedrafterError, match=r"odd\.gguf"):
            read()


def test_what_a_shell_passes_on_is_read() -> None:
    """As in `--prompts <(sort prompts.txt)`: a pipe that has a writer."""
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "w") as file:
            file.write("Why?\nHow?\n")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert [row for _, row in read_rows(f"/dev/fd/{reading}")] == ["Why?", "How?"]
    finally:
        writer.join()
        os.close(reading)
