"""GGUF files of models that keep recurrent states, or latent keys, draft and stay exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny import plain_tokens
from train_runs import Keys, TrainCommand, own_cache, prompts  # noqa: F401

from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.loading.load import load
from redrafter_mlx.weights.text.chat import encode_text

pytest.importorskip("gguf")
from command_line import CommandLine
from gguf_cases import CASES
from gguf_files import Case, write_file

HYBRIDS = [
    "granitehybrid", "granitehybrid, experts", "nemotron_h", "nemotron_h_moe", "falcon-h1", "jamba",
    "kimi-linear", "deepseek2 of 2025",
]  # fmt: skip
PROMPT = [5, 70, 12, 9, 33, 101, 12, 9, 33, 7]
COUNT = 40


def untied(name: str) -> Case:
    """Return a case with a head: a random embedding as the head would repeat one token."""
    case = CASES[name]
    return replace(case, config={**case.config, "tie_word_embeddings": False})


@pytest.mark.parametrize("name", HYBRIDS)
def test_drafted_tokens_are_those_of_mlx_lms_own_loop(tmp_path: Path, name: str) -> None:
    model = write_file(tmp_path / "m.gguf", untied(name))
    want = plain_tokens(model, PROMPT, COUNT)
    assert len({*want}) > 5
    for drafter in ("lookup", Oracle([*PROMPT, *want], vocab=267)):
        redrafter = load(tmp_path / "m.gguf", drafter, dtype="float32")
        answer = list(redrafter.stream(PROMPT, max_tokens=COUNT, beam_width=2, beam_length=4))
        assert [r.token for r in answer] == want[: len(answer)]
        ended = answer[-1].token in redrafter.tokenizer.eos_token_ids
        assert ended or len(answer) == COUNT
    assert any(r.source == "drafter" for r in answer)


def test_a_drafter_is_trained_on_a_hybrid_and_accepted(
    tmp_path: Path, prompts: Path, cli: CommandLine
) -> None:
    path = tmp_path / "m.gguf"
    model = write_file(path, untied("granitehybrid"))
    keys: Keys = {"training": {"epochs": 12}}
    TrainCommand(path, prompts, cli).run(tmp_path / "drafter", "--raw", keys=keys)
    redrafter = load(path, tmp_path / "drafter", dtype="float32")
    prompt = encode_text(redrafter.tokenizer, "Question number 3?")
    answer = list(redrafter.stream(prompt, max_tokens=COUNT, beam_width=2, beam_length=4))
    assert [r.token for r in answer] == plain_tokens(model, prompt, len(answer))
    assert any(r.source == "drafter" for r in answer)
