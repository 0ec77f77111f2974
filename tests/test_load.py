"""Which drafter a model gets."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny import HIDDEN, VOCAB, random_drafter, random_model

from redrafter_mlx import loading
from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafter_files import save_drafter
from redrafter_mlx.errors import BadInputError, MismatchError, ModelNotFoundError
from redrafter_mlx.loading import LoadedTarget, TargetSource, find_drafter, load
from redrafter_mlx.lookup import LOOKUP_SHAPE


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a tiny model under the name `tiny` with fingerprint sha256:t."""
    from tiny import byte_tokenizer

    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    source = TargetSource("tiny", tmp_path, "sha256:t", "llama", "float32", None, None)

    def tiny_target(*_: object, **__: object) -> LoadedTarget:
        return LoadedTarget(random_model(), byte_tokenizer(), source)

    monkeypatch.setattr(loading, "load_target", tiny_target)
    return tmp_path / "drafters"


def test_without_a_drafter_it_looks_up_and_says_how_to_train_one(shelf: Path) -> None:
    redrafter = load("tiny")
    assert redrafter.drafter is None
    assert redrafter.drafting == "lookup"
    assert redrafter.beam_shape == LOOKUP_SHAPE
    assert redrafter.drafter_note is not None
    assert redrafter.drafter_note.startswith("no drafter for tiny yet, drafting by lookup; ")
    assert "redrafter-mlx train --model tiny" in redrafter.drafter_note
    # A text that repeats itself is taken several tokens at a time, unless drafts are refused.
    asked = [1, 2, 3, 4] * 5
    assert redrafter.generate(asked, max_tokens=60).tokens_per_step > 1.2
    assert redrafter.generate(asked, max_tokens=60, draft=False).tokens_per_step == 1.0
    assert not shelf.exists()


def test_what_drafts_is_chosen_by_a_word(shelf: Path) -> None:
    save_drafter(random_drafter(1), shelf / "a")
    words = [("lookup", "lookup"), ("auto", "lookup"), ("auto+lookup", "lookup"), (None, None),
             (shelf / "a", "drafter"), (f"{shelf / 'a'}+lookup", "drafter and lookup")]  # fmt: skip
    for word, drafting in words:
        redrafter = load("tiny", drafter=word)
        assert redrafter.drafting == drafting
        assert (redrafter.drafter_note is None) == (word not in ("auto", "auto+lookup"))
    assert redrafter.beam_shape == BeamShape(3, 4, 7), "a beam more in as many nodes"
    with pytest.raises(ModelNotFoundError, match="there is no drafter for tiny; `redrafter-mlx tr"):
        load("tiny", drafter="trained")
    save_drafter(random_drafter(2, target_fingerprint="sha256:t"), shelf / "b")
    for word in ("auto", "auto+lookup", "trained+lookup"):
        assert load("tiny", drafter=word).drafting == "drafter and lookup"
    assert load("tiny", drafter="trained").drafting == "drafter"
    assert load("tiny", drafter="lookup").drafting == "lookup"
    assert load("tiny", drafter=None).generate([1, 2], max_tokens=5).tokens_per_step == 1.0
    with pytest.raises(BadInputError, match=r"drafter is '\+lookup'; name a drafter before"):
        load("tiny", drafter="+lookup")
    with pytest.raises(ModelNotFoundError, match="no drafter at"):
        load("tiny", drafter=f"{shelf / 'nothing'}+lookup")


def test_the_drafter_that_was_trained_for_this_target_is_found(shelf: Path) -> None:
    save_drafter(random_drafter(1, target_fingerprint="sha256:other"), shelf / "a")
    mine = random_drafter(2, target_fingerprint="sha256:t", beam_width=3)
    save_drafter(mine, shelf / "b")
    redrafter = load("tiny")
    assert redrafter.drafter is not None
    assert redrafter.drafter_note is None
    for (_, a), (_, b) in zip(
        tree_flatten(redrafter.drafter.parameters()), tree_flatten(mine.parameters()), strict=True
    ):
        assert mx.array_equal(a, b)


def test_a_damaged_folder_does_not_hide_a_good_one_and_is_named_without_one(shelf: Path) -> None:
    (shelf / "a").mkdir(parents=True)
    (shelf / "a" / "config.json").write_text("{")
    note = load("tiny").drafter_note
    assert note is not None
    assert str(shelf / "a" / "config.json") in note
    save_drafter(random_drafter(target_fingerprint="sha256:t"), shelf / "b")
    assert find_drafter("sha256:t")[0] == shelf / "b"


def test_a_wrong_folder_is_said_before_the_target_is_loaded(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_target", None)
    with pytest.raises(ModelNotFoundError, match="no drafter at"):
        load("tiny", drafter=shelf / "nothing")


def test_a_drafter_for_another_target_is_refused_by_both_names(shelf: Path) -> None:
    shelf.mkdir()
    config = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "exit_dim": 8, "num_draft_layers": 1,
              "rnn": True, "target": "other", "target_fingerprint": "sha256:o"}  # fmt: skip
    (shelf / "config.json").write_text(json.dumps(config))
    with pytest.raises(MismatchError, match=r"other \(sha256:o\), not for tiny \(sha256:t\)"):
        load("tiny", drafter=shelf)
