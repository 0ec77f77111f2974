"""What an engine has read is there after a restart."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from eagle_files import TRAINED, load
from eagle_samples import LAYERS, random_tensors, write_files
from ended import ended
from tiny import byte_model, byte_tokenizer, random_drafter, truncated

from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.target_model.model import Target

PROMPT = [(7 * i + 3) % 256 for i in range(330)]
MORE = [5, 6, 7]
SHAPE = {"beam_width": 2, "beam_length": 4}
DRAFTERS = ("none", "own and lookup", "draft model", "EAGLE-3")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return byte_model(num_hidden_layers=LAYERS, tie_word_embeddings=False)


def start(model: nn.Module, form: str, folder: Path, **limits: object) -> Redrafter:
    """Return an engine like that of a process that has just started."""
    drafter: object = None
    host = [Lookup()] if form == "own and lookup" else []
    if form == "own and lookup":
        drafter = random_drafter(vocab_size=258)
    elif form == "draft model":
        drafter = DraftModel(truncated(model, 1), byte_tokenizer())
    elif form == "EAGLE-3":
        sample = TRAINED["EAGLE-3"]
        if not (files := folder.parent / "eagle").exists():
            write_files(files, sample, random_tensors(sample))
        drafter = load(files, Target(model))
    return Redrafter(
        model, byte_tokenizer(), drafter, host_drafters=host,  # type: ignore[arg-type]
        engine=EngineOptions(cache_dir=folder, **limits),  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("form", DRAFTERS)
def test_after_a_restart_a_conversation_reads_its_new_tokens_only(
    model: nn.Module, tmp_path: Path, form: str
) -> None:
    folder = tmp_path / "cache"
    first = start(model, form, folder)
    drafts = SHAPE if form != "none" else {}
    answer = first.generate(PROMPT, max_tokens=20, **drafts)
    again = [*PROMPT, *answer.token_ids, *MORE]
    want = list(first.stream(again, max_tokens=20, cache_prompt=False, **drafts))
    ended(first)
    second = start(model, form, folder)
    got = list(second.stream(again, max_tokens=20, **drafts))
    assert [one.token for one in got] == [one.token for one in want]
    assert got[-1].steps == want[-1].steps, "the drafter remembers as much"
    assert got[0].cached_tokens >= len(again) - len(MORE) - 2
    ended(second)


def test_other_weights_and_other_numbers_read_for_themselves(
    model: nn.Module, tmp_path: Path
) -> None:
    one = start(model, "none", tmp_path)
    one.generate(PROMPT, max_tokens=2)
    ended(one)
    half = byte_model(num_hidden_layers=LAYERS, tie_word_embeddings=False)
    half.set_dtype(mx.float16)
    for other in (byte_model(seed=3, num_hidden_layers=LAYERS), half):
        engine = start(other, "none", tmp_path)
        assert next(engine.stream([*PROMPT, 1], max_tokens=1)).cached_tokens == 0
        ended(engine)


def test_a_damaged_file_is_read_as_none(model: nn.Module, tmp_path: Path) -> None:
    one = start(model, "none", tmp_path)
    want = one.generate([*PROMPT, 1], max_tokens=5, cache_prompt=False).token_ids
    one.generate(PROMPT, max_tokens=2)
    ended(one)
    (file,) = tmp_path.glob("*/*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    two = start(model, "none", tmp_path)
    responses = list(two.stream([*PROMPT, 1], max_tokens=5))
    assert responses[0].cached_tokens == 0
    assert [one.token for one in responses] == want
    ended(two)


def test_what_is_not_to_be_kept_is_not_written(model: nn.Module, tmp_path: Path) -> None:
    engine = start(model, "none", tmp_path)
    engine.generate(PROMPT, max_tokens=2, cache_prompt=False)
    ended(engine)
    assert not [*tmp_path.glob("*/*")]


def test_a_limit_without_a_folder_is_refused() -> None:
    with pytest.raises(BadInputError, match="cache_dir"):
        EngineOptions(cache_bytes=10)
