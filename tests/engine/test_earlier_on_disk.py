"""Earlier texts are copied from after a restart, too."""

from __future__ import annotations

from pathlib import Path

import mlx.nn as nn
import pytest
from ended import ended
from tiny import byte_model, byte_tokenizer

from redrafter_mlx.drafting.untrained.earlier import EarlierTexts
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions

FIRST = [*b"rename the river in this file"]
SECOND = [*b"and now: rename the river in this file"]
ASKED = {"max_tokens": 48, "beam_width": 1, "beam_length": 8, "seed": 3}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return byte_model(seed=2)


def start(model: nn.Module, folder: Path | None) -> Redrafter:
    """Return an engine like that of a process that has just started."""
    host = (Lookup(), EarlierTexts())
    options = EngineOptions(cache_dir=folder)
    return Redrafter(model, byte_tokenizer(), host_drafters=host, engine=options)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_after_a_restart_an_edit_takes_no_more_steps_than_in_the_same_process(
    model: nn.Module, tmp_path: Path, temperature: float
) -> None:
    asked = {**ASKED, "temperature": temperature}
    one = start(model, None)
    fresh = one.generate(FIRST, **asked).steps
    want = one.generate(FIRST, **asked)
    one.close()
    assert want.steps < fresh
    before = start(model, tmp_path)
    before.generate(FIRST, **asked)
    ended(before)
    after = start(model, tmp_path)
    got = after.generate(FIRST, **asked)
    ended(after)
    assert got.token_ids == want.token_ids
    assert got.steps <= want.steps
    (file,) = tmp_path.glob("*/texts-*.bin")
    assert file.stat().st_size < 10_000


def test_other_weights_find_no_texts_and_answer_as_ever(model: nn.Module, tmp_path: Path) -> None:
    one = start(model, tmp_path)
    one.generate(FIRST, **ASKED)
    ended(one)
    other = byte_model(seed=5)
    alone, beside = start(other, None), start(other, tmp_path)
    want, got = (engine.generate(FIRST, **ASKED) for engine in (alone, beside))
    assert (got.token_ids, got.steps) == (want.token_ids, want.steps)
    ended(beside)
    alone.close()


def test_a_text_that_is_not_to_be_kept_is_not_written(model: nn.Module, tmp_path: Path) -> None:
    engine = start(model, tmp_path)
    engine.generate(FIRST, cache_prompt=False, **ASKED)
    ended(engine)
    assert not [*tmp_path.rglob("texts-*")]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_several_answers_at_once_are_all_kept(model: nn.Module, tmp_path: Path) -> None:
    one = start(model, tmp_path)
    prompts = [[n, *SECOND] for n in range(6)]
    list(one.batch(prompts, **ASKED))
    ended(one)
    after = start(model, tmp_path)
    (texts,) = [drafter for drafter in after.host_drafters if drafter.name == "earlier"]
    assert isinstance(texts, EarlierTexts)
    assert sorted(text.tokens[: len(prompts[0])].tolist() for text in texts.texts) == prompts
    ended(after)
