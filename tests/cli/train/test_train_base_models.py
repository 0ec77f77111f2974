"""`redrafter-mlx train` for models that cannot chat: no template, or turns that never end."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CommandLine
from tiny import CHAT_TEMPLATE, byte_model, byte_tokenizer
from train_runs import Keys, options_file, save_folder

from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.reader import Reader
from redrafter_mlx.distill.options_file import read_options
from redrafter_mlx.target_model.model import Target

TEXTS = [f"The text of number {i} goes on for a while, and ends." for i in range(70)]


def base_model(folder: Path, template: str | None) -> Path:
    """Write a tiny model's folder, whose end of text the model never writes."""
    words = byte_tokenizer()
    words._tokenizer.add_tokens(["<eos>"], special_tokens=True)  # beyond the model's vocabulary
    words._tokenizer.eos_token = "<eos>"
    words._tokenizer.chat_template = template
    return save_folder(folder, tokenizer=words)


def command(folder: Path, writing: dict[str, object] | None = None, workers: int = 2) -> list[str]:
    """Return the command of a small run, and write a file of plain texts beside its options."""
    keys: Keys = {
        "": {"workers": workers, "timed_questions": 1},
        "writing": {"own_share": None, **(writing or {})},
        "drafter": {"context_layers": []},
        "training": {"epochs": 1},
    }
    (folder / "texts.txt").write_text("\n".join(TEXTS))
    return [
        "train", "--config", str(options_file(folder / "small.toml", keys)),
        "--output", str(folder / "out"), "--model", str(folder / "base"),
    ]  # fmt: skip


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    return command(tmp_path)


def test_a_model_without_a_template_is_refused_in_one_line_before_it_is_loaded(
    line: list[str], tmp_path: Path, cli: CommandLine
) -> None:
    weights = base_model(tmp_path / "base", None) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])  # loading it would find it damaged
    for more in ([], ["--prompts", str(tmp_path / "texts.txt")], ["--hours", "8"]):
        (error,) = cli.error(*line, *more).splitlines()
        assert "no chat template" in error
        assert all(option in error for option in ("--data", "--prompts", "--raw"))
    assert not (tmp_path / "cache" / "corpora").exists()


def test_a_model_whose_turns_never_end_is_given_up_after_one_block_with_the_reason(
    tmp_path: Path, cli: CommandLine
) -> None:
    base_model(tmp_path / "base", CHAT_TEMPLATE)
    error = cli.error(*command(tmp_path, {"batch": 30}, workers=1))
    assert "prompt unfinished" in error
    assert "--raw" in error
    written = [*(tmp_path / "cache" / "corpora").rglob("block-*")]
    assert len(written) <= 2  # one, and the prompts read with it


@pytest.mark.parametrize("option", ["--data", "--prompts"])
def test_plain_texts_train_a_drafter_for_a_model_without_a_template(
    option: str, line: list[str], tmp_path: Path, cli: CommandLine
) -> None:
    base_model(tmp_path / "base", None)
    assert "--raw" in cli.out(*line, "--raw", option, tmp_path / "texts.txt")  # how to use it
    assert read_options(tmp_path / "out" / "train.toml")["raw"] is True
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "writing", "named"),
    [
        (["--raw"], {}, "--data"),
        (["--raw", "--prompts", "texts.txt"], {"own_share": 0.5}, "own_share"),
    ],
)
def test_raw_without_texts_is_refused(
    options: list[str], writing: dict[str, object], named: str, tmp_path: Path,
    cli: CommandLine,
) -> None:  # fmt: skip
    assert named in cli.error(*command(tmp_path, writing), *options)


def test_plain_texts_are_read_as_they_are() -> None:
    words = byte_tokenizer()
    given = [
        Conversation(("One two three four five six seven.",)),
        Conversation(("What? ",), ("That, and more.",)),
    ]
    reader = Reader(Target(byte_model()), words, given, "data", 3, raw=True)
    texts = reader.write(0).texts
    read = [words.decode([*text.prompt, *text.answer.tolist()]) for text in texts]
    assert read == ["One two three four five six seven.", "What? That, and more."]
    assert words.decode(texts[1].prompt) == "What? "
