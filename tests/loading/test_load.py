"""Which drafter a model gets."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny import (
    HIDDEN,
    VOCAB,
    plain_tokens,
    random_drafter,
    random_model,
    targets_made,
    tiny_source,
)

from redrafter_mlx.drafting.files.installed import find_drafters
from redrafter_mlx.drafting.names import parse
from redrafter_mlx.drafting.published.heads.medusa import MedusaConfig, MedusaNetwork, save_medusa
from redrafter_mlx.drafting.recurrent import save_drafter
from redrafter_mlx.drafting.recurrent_config import read_config
from redrafter_mlx.drafting.untrained.successors import table_of
from redrafter_mlx.errors import BadInputError, DamagedFileError, MismatchError, ModelNotFoundError
from redrafter_mlx.learning.folder import LearningFolder
from redrafter_mlx.learning.kept_texts import TextStore
from redrafter_mlx.loading import load as loading
from redrafter_mlx.loading.drafter import prepare_drafter
from redrafter_mlx.loading.load import load
from redrafter_mlx.loading.target import LoadedTarget
from redrafter_mlx.weights.registry import DEFAULT_MODEL, REGISTRY


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a tiny model under the name `tiny` with fingerprint sha256:t."""
    from tiny import byte_tokenizer

    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    source = tiny_source(tmp_path, "sha256:t")

    def tiny_target(*_: object, **__: object) -> LoadedTarget:
        return LoadedTarget.of(random_model(), byte_tokenizer(), source)

    monkeypatch.setattr(loading, "load_target", tiny_target)
    return tmp_path / "drafters"


NEITHER = "lookup and earlier"
"""What drafts where no drafter was trained or published."""


def test_without_a_drafter_it_looks_up_and_says_how_to_train_one(shelf: Path) -> None:
    redrafter = load("tiny")
    assert redrafter.drafter is None
    assert redrafter.drafting == NEITHER
    assert redrafter.beam_shape.length > 1
    assert redrafter.drafter_note is not None
    assert "no drafter for tiny yet" in redrafter.drafter_note
    assert "redrafter-mlx train tiny" in redrafter.drafter_note
    # A repetitive text is emitted several tokens per step, unless drafts are off.
    asked = [1, 2, 3, 4] * 5
    assert redrafter.generate(asked, max_tokens=60).tokens_per_step > 1.2
    assert redrafter.generate(asked, max_tokens=60, draft=False).tokens_per_step == 1.0
    assert not shelf.exists()


def test_without_a_drafter_it_drafts_with_the_successors_that_are_known(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a model has been idle, the next start finds them; a trained drafter is better."""
    monkeypatch.setattr(loading, "table_of", table_of)
    first, kept = load("tiny"), shelf.parent / "successors"
    end = time.monotonic() + 20
    while not (kept.exists() and [*kept.glob("[!.]*.npz")]):
        assert time.monotonic() < end
        time.sleep(0.02)
    asked = {"max_tokens": 30, "beam_width": 1, "beam_length": 4}
    want = first.generate([5, 6, 7], **asked).token_ids
    again = load("tiny")
    assert again.drafting == f"successors and {NEITHER}"
    assert again.generate([5, 6, 7], **asked).token_ids == want
    assert load("tiny", drafter="lookup").drafting == "lookup"
    save_drafter(random_drafter(2, target_fingerprint="sha256:t"), shelf / "b")
    assert load("tiny").drafting == f"drafter and {NEITHER}"


def test_successors_that_are_asked_for_are_read_first(shelf: Path) -> None:
    redrafter = load("tiny", drafter="successors+lookup")
    assert redrafter.drafting == "successors and lookup"
    assert [*(shelf.parent / "successors").glob("*.npz")]
    with pytest.raises(BadInputError, match="successors cannot draft along"):
        load("tiny", drafter="successors+tree:medusa_mc_sim_7b_63")


def test_what_drafts_is_chosen_by_a_word(shelf: Path) -> None:
    save_drafter(random_drafter(1), shelf / "a")
    words = [("lookup", "lookup"), ("earlier+lookup", "lookup and earlier"), (None, None),
             ("auto", NEITHER), ("auto+lookup", NEITHER),
             (shelf / "a", "drafter"), (f"{shelf / 'a'}+lookup", "drafter and lookup"),
             (f"lookup+{shelf / 'a'}", "drafter and lookup")]  # fmt: skip
    for word, drafting in words:
        redrafter = load("tiny", drafter=word)
        assert redrafter.drafting == drafting
        assert (redrafter.drafter_note is None) == (word not in ("auto", "auto+lookup"))
    with pytest.raises(ModelNotFoundError, match=r"tiny.*`redrafter-mlx train"):
        load("tiny", drafter="trained")
    save_drafter(random_drafter(2, target_fingerprint="sha256:t"), shelf / "b")
    for word in ("auto", "auto+lookup", "trained+earlier+lookup"):
        assert load("tiny", drafter=word).drafting == "drafter and lookup and earlier"
    assert load("tiny", drafter="trained").drafting == "drafter"
    assert load("tiny", drafter="lookup").drafting == "lookup"
    for word in (None, "none"):
        assert load("tiny", drafter=word).generate([1, 2], max_tokens=5).tokens_per_step == 1.0
    for word in ("+lookup", "lookup+"):
        with pytest.raises(BadInputError, match=f"drafter is '{re.escape(word)}'"):
            load("tiny", drafter=word)
    for words, why in (
        ("none+lookup", "none decodes plainly"),
        ("lookup+lookup", "lookup is named twice"),
        ("", "drafter is ''; name a drafter, or none"),
    ):
        with pytest.raises(BadInputError, match=why):
            load("tiny", drafter=words)
    for name in (f"{shelf / 'nothing'}+lookup", "x" * 300):
        with pytest.raises(ModelNotFoundError, match="no drafter at"):
            load("tiny", drafter=name)


@pytest.mark.parametrize("name", ["~/a", Path("~/a"), "~/a+lookup", "~/own.py:Own"])
def test_a_drafter_below_the_home_folder_is_found(
    shelf: Path, name: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(shelf))
    save_drafter(random_drafter(1), shelf / "a")
    (shelf / "own.py").write_text(
        "from redrafter_mlx.drafting.oracle import Oracle\n"
        "class Own(Oracle):\n    def __init__(self): super().__init__([], 9)\n"
    )
    assert prepare_drafter(parse(name)).parts


def test_the_drafter_that_was_trained_for_this_target_is_found(shelf: Path) -> None:
    save_drafter(random_drafter(1, target_fingerprint="sha256:other"), shelf / "a")
    mine = random_drafter(2, target_fingerprint="sha256:t", draft_length=3)
    save_drafter(mine, shelf / "b")
    redrafter = load("tiny")
    assert redrafter.drafter is not None
    assert redrafter.drafter_note is None
    for (_, a), (_, b) in zip(
        tree_flatten(redrafter.drafter.module.parameters()),
        tree_flatten(mine.parameters()),
        strict=True,
    ):
        assert mx.array_equal(a, b)


def test_a_trained_drafter_is_bound_to_the_loaded_target(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one would build the graph of all layers once more."""
    save_drafter(random_drafter(2, target_fingerprint="sha256:t"), shelf / "b")
    made = targets_made(monkeypatch)
    assert load("tiny").drafting == "drafter and lookup and earlier"
    assert made == ["llama"]


MINE = "sha256:t"
CONFIGS = {
    "not JSON": "{",
    "a list": "[]",
    "nested deeply": "[" * 200_000,
    "6,000 digits": '{"hidden_size": 1' + "0" * 6000 + "}",
    "400 digits": {"hidden_size": 10**400},
    "exit_dim": {"exit_dim": 10**12},
    "num_draft_layers": {"num_draft_layers": 10**9},
    "lookback": {"num_lookback_tokens": "many"},
    "layers": {"context_layers": [[0]]},
    "head": {"head": ["own"]},
    "target": {"target": 7},
    "beam": {"beam_width": "4"},
}


def _write_config(folder: Path, content: object) -> None:
    config = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "exit_dim": 8, "num_draft_layers": 1,
              "rnn": True, "target_fingerprint": MINE}  # fmt: skip
    folder.mkdir(parents=True)
    text = content if isinstance(content, str) else json.dumps({**config, **content})  # type: ignore[dict-item]
    (folder / "config.json").write_text(text)


@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_of_wrong_type_or_range_is_one_line_and_is_passed_over(
    shelf: Path, what: str
) -> None:
    _write_config(shelf / "a", CONFIGS[what])
    with pytest.raises(DamagedFileError, match=r"a/config\.json") as caught:
        read_config(shelf / "a")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(shelf)) + 300
    save_drafter(random_drafter(target_fingerprint=MINE), shelf / "b")
    folders, broken = find_drafters(MINE)
    assert folders == [shelf / "b"]
    assert [str(error) for error in broken] == [str(caught.value)]


def _nan(folder: Path) -> None:
    weights = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
    mx.eval(weights)
    weights["rnn_u.bias"] = mx.where(mx.arange(HIDDEN) == 3, mx.nan, weights["rnn_u.bias"])
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def _other_sizes(folder: Path) -> None:
    save_drafter(random_drafter(hidden_size=2 * HIDDEN, target_fingerprint=MINE), folder)


BROKEN = {
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "weights cut off": lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 9),
    "not a number": _nan,
    "other sizes": _other_sizes,
    "config is a folder": lambda folder: (
        (folder / "config.json").unlink(), (folder / "config.json").mkdir()),
    "config is a pipe": lambda folder: (
        (folder / "config.json").unlink(), os.mkfifo(folder / "config.json")),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_drafter_is_named_and_the_next_one_taken(shelf: Path, what: str) -> None:
    save_drafter(random_drafter(1, target_fingerprint=MINE), shelf / "good")
    save_drafter(random_drafter(2, target_fingerprint=MINE), shelf / "broken")
    BROKEN[what](shelf / "broken")
    _written(shelf / "good", 1)
    redrafter = load("tiny")
    assert redrafter.drafter is not None
    assert redrafter.drafter_note is not None
    assert str(shelf / "broken") in redrafter.drafter_note
    shutil.rmtree(shelf / "good")
    alone = load("tiny")
    assert alone.drafter is None
    assert alone.drafting == NEITHER
    assert alone.drafter_note is not None
    assert str(shelf / "broken") in alone.drafter_note
    with pytest.raises(ModelNotFoundError, match=str(shelf / "broken")):
        load("tiny", drafter="trained")


def test_beside_another_drafter_too(shelf: Path) -> None:
    for name, written in (("broken", 9), ("good", 1)):
        save_drafter(random_drafter(1, target_fingerprint=MINE), shelf / name)
        _written(shelf / name, written)
    _nan(shelf / "broken")
    other = shelf.parent / "other"
    save_drafter(random_drafter(2), other)
    for name in (f"trained+{other}", f"{other}+trained"):
        redrafter = load("tiny", drafter=name)
        assert redrafter.drafting == "drafter and drafter"
        assert str(shelf / "broken") in str(redrafter.drafter_note)


def _written(folder: Path, seconds: int) -> None:
    if (folder / "model.safetensors").exists():
        os.utime(folder / "model.safetensors", (seconds, seconds))


def test_a_cache_of_drafters_that_is_a_file_is_named_and_passed_over(shelf: Path) -> None:
    shelf.write_text("no folder")
    note = load("tiny").drafter_note
    assert note is not None
    assert str(shelf) in note


def test_the_drafter_written_last_is_taken_and_named(shelf: Path) -> None:
    for written, name in [(3, "b"), (9, "a"), (5, "c")]:
        save_drafter(random_drafter(written, target_fingerprint=MINE), shelf / name)
        _written(shelf / name, written)
    folders, _ = find_drafters(MINE)
    assert [folder.name for folder in folders] == ["a", "c", "b"]
    redrafter = load("tiny")
    assert redrafter.drafter_note is not None
    assert str(shelf / "a") in redrafter.drafter_note
    assert redrafter.drafter is not None
    want = random_drafter(9, target_fingerprint=MINE)
    assert mx.array_equal(redrafter.drafter.module.rnn_u.weight, want.rnn_u.weight)


def test_the_users_own_drafter_comes_before_the_shipped_one(shelf: Path) -> None:
    pinned = REGISTRY[DEFAULT_MODEL].pinned
    assert pinned is not None
    shipped = f"sha256:{pinned.sha256}"
    save_drafter(random_drafter(target_fingerprint=shipped), shelf / "mine")
    _written(shelf / "mine", 1)
    folders, _ = find_drafters(shipped)
    assert folders[0] == shelf / "mine"
    assert [folder.name for folder in folders] == ["mine", DEFAULT_MODEL]


def test_a_wrong_folder_is_said_before_the_target_is_loaded(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_target", None)
    with pytest.raises(ModelNotFoundError, match="no drafter at"):
        load("tiny", drafter=shelf / "nothing")


def test_auto_beside_another_drafter_is_refused_before_the_target_is_loaded(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_drafter(random_drafter(1), shelf / "a")
    monkeypatch.setattr(loading, "load_target", None)
    for name in (f"auto+{shelf / 'a'}", f"{shelf / 'a'}+auto"):
        with pytest.raises(BadInputError, match=r"auto is trained\+lookup"):
            load("tiny", drafter=name)


def test_a_drafter_for_another_target_is_refused_by_both_names(shelf: Path) -> None:
    save_drafter(random_drafter(target="other", target_fingerprint="sha256:o"), shelf)
    with pytest.raises(MismatchError, match=r"other \(sha256:o\), not for tiny \(sha256:t\)"):
        load("tiny", drafter=shelf)


def test_drafter_bits_quantise_what_drafts_and_change_no_token(shelf: Path) -> None:
    save_drafter(random_drafter(1, target_fingerprint=MINE), shelf / "a")
    asked, wanted = [1, 2, 3], plain_tokens(random_model(), [1, 2, 3], 12)
    for word in ("trained", str(shelf / "a"), f"{shelf / 'a'}+lookup", "auto"):
        redrafter = load("tiny", drafter=word, drafter_bits=4)
        assert redrafter.drafter is not None
        assert redrafter.drafter.module is not None
        assert "input_proj.scales" in dict(tree_flatten(redrafter.drafter.module.parameters()))
        assert redrafter.generate(asked, max_tokens=12).token_ids == wanted
    with pytest.raises(BadInputError, match="drafter_bits is 3; it must be 4, 8 or"):
        load("tiny", drafter_bits=3)
    with pytest.raises(BadInputError, match="drafter_bits quantises a drafter that is loaded"):
        load("tiny", drafter=random_drafter(), drafter_bits=4)


def test_a_drafter_of_another_form_is_found_by_the_target_it_was_trained_for(shelf: Path) -> None:
    save_drafter(random_drafter(1, target_fingerprint=MINE), shelf / "a")
    config = MedusaConfig(HIDDEN, VOCAB, 2, 1, True, "target", VOCAB)
    save_medusa(MedusaNetwork(config), shelf / "heads", {"target_fingerprint": MINE})
    save_medusa(MedusaNetwork(config), shelf / "others", {"target_fingerprint": "sha256:other"})
    _written(shelf / "a", 1)
    _written(shelf / "heads", 2)
    folders, broken = find_drafters(MINE)
    assert [folder.name for folder in folders] == ["heads", "a"]
    assert not broken
    assert load("tiny", drafter="trained").drafting == "Medusa"


def test_answers_are_kept_only_where_it_is_asked_for(shelf: Path) -> None:
    plain = load("tiny", "none")
    plain.generate([1, 2, 3], max_tokens=20)
    plain.close()
    assert not (shelf.parent / "learning").exists()
    learning = load("tiny", "none", learn=True)
    answer = learning.generate([1, 2, 3], max_tokens=20)
    learning.close()
    assert learning.keeper is not None
    learning.keeper.close()
    (text,) = TextStore(LearningFolder.of("sha256:t").texts).texts()
    assert text.answer == tuple(answer.token_ids)
