"""Published drafters are tried once, and the reading with the highest acceptance is used."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from draft_models import PROMPT
from eagle_files import changed_config, load, seen
from eagle_samples import SAMPLES, VOCAB, random_tensors, write_files
from tiny import HIDDEN, LLAMA3_ROPE, byte_tokenizer, plain_tokens, tiny_source

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.interface import Drafter, Memory, Seen
from redrafter_mlx.drafting.published import calibration
from redrafter_mlx.drafting.published.calibration import AS_STORED, acceptance, best_reading
from redrafter_mlx.drafting.published.heads.eagle import EagleDrafter
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.runtime.files.paths import cache_dir
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.target_model.model import Target


@pytest.fixture
def eagle(trained: dict[str, Path]) -> Path:
    return trained["EAGLE-3"]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def a_learned_answer(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the built-in calibration texts by an answer that the drafter has learned."""
    text = PROMPT + plain_tokens(model, PROMPT, 30)
    monkeypatch.setattr(calibration, "encoded", lambda *_: text)


def bind(folder: Path, model: nn.Module) -> Drafter:
    source = tiny_source(fingerprint="its fingerprint")
    return DrafterFolder(folder, source).bind(Target(model), byte_tokenizer())


@pytest.mark.usefixtures("a_learned_answer")
def test_layers_that_are_counted_from_one_are_found_out(
    model: nn.Module, eagle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured once: the second time, the stored result is used."""
    wrong = changed_config(eagle, tmp_path, eagle_aux_hidden_state_layer_ids=[3, 4, 5])
    drafter = bind(wrong, model)
    assert drafter.features.layers == (2, 3, 4)
    assert "layers one earlier" in str(drafter.note)
    assert len([*(cache_dir() / "calibration").iterdir()]) == 1
    monkeypatch.setattr(calibration, "acceptance", lambda *_: pytest.fail("measured again"))
    again = bind(wrong, model)
    assert again.features.layers == (2, 3, 4)
    assert again.note == drafter.note
    shown = Redrafter(model, byte_tokenizer(), again, drafter_note="another note").drafter_note
    assert shown == f"another note; {drafter.note}"


@pytest.mark.usefixtures("a_learned_answer")
def test_files_that_are_right_are_read_as_they_are(model: nn.Module, eagle: Path) -> None:
    drafter = bind(eagle, model)
    assert drafter.features.layers == (2, 3, 4)
    assert drafter.note is None
    (found,) = (cache_dir() / "calibration").iterdir()
    found.write_text("damaged")
    assert bind(eagle, model).note is None


def test_corrected_files_are_measured_afresh(
    model: nn.Module, eagle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading is relative to config.json."""

    def measured(drafter: Drafter, *_: object) -> tuple[float, float]:
        return float(drafter.features.layers == (2, 3, 4)), 0.0

    monkeypatch.setattr(calibration, "acceptance", measured)
    folder = changed_config(eagle, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for layers in ([3, 4, 5], [2, 3, 4]):
        changed = {**config, "eagle_aux_hidden_state_layer_ids": layers}
        (folder / "config.json").write_text(json.dumps(changed))
        assert bind(folder, model).features.layers == (2, 3, 4)


@pytest.mark.usefixtures("a_learned_answer")
def test_a_drafter_that_guesses_nothing_is_reported(model: nn.Module, tmp_path: Path) -> None:
    sample = SAMPLES["EAGLE-3, speculators"]
    drafter = bind(write_files(tmp_path / "d", sample, random_tensors(sample)), model)
    assert "where 60% is usual" in str(drafter.note)


def test_a_drafter_without_a_known_target_is_not_tried(model: nn.Module, eagle: Path) -> None:
    assert load(eagle, Target(model)).note is None
    assert not cache_dir().exists()


def test_built_in_answers_are_read_as_a_chat() -> None:
    tokenizer = byte_tokenizer()
    for question, answer in calibration.ANSWERS:
        ids = calibration.encoded(tokenizer, question, answer, 258)
        said = f"{question}<|im_end|>\n<|im_start|>assistant\n{answer}"
        assert tokenizer.decode(ids).endswith(said)


def test_another_reading_has_to_be_clearly_better() -> None:
    assert best_reading({AS_STORED: (0.6, 0.4), "other": (0.64, 0.44)}) == AS_STORED
    assert best_reading({AS_STORED: (0.6, 0.4), "other": (0.7, 0.5)}) == "other"


def test_readings_with_equal_first_drafts_are_told_apart_by_the_second() -> None:
    assert best_reading({AS_STORED: (0.6, 0.2), "other": (0.6, 0.4)}) == "other"


@dataclass(frozen=True)
class Scripted(Drafter):
    """Drafts the tokens of a script at their positions, except for draft number `wrong`."""

    script: mx.array
    wrong: int = 0

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        drafts = mx.arange(shape.length)
        tokens = self.script[seen.root_position[:, None] + drafts]
        tokens = tokens + (drafts == self.wrong)
        return Beams(tokens[:, None].astype(mx.int32), mx.zeros((1, 1, shape.length))), memory


def test_a_second_draft_counts_after_a_right_first_one_that_the_text_goes_on_with(
    model: nn.Module,
) -> None:
    target = Target(model)
    answer = PROMPT + plain_tokens(model, PROMPT, len(PROMPT) + 2)
    for wrong, want in ((0, (1, 1)), (1, (0, 0)), (2, (1, 0))):
        drafter = Scripted(mx.array(answer), wrong)
        assert acceptance(drafter, target, [answer[:-1]]) == want
    other = np.random.default_rng(0).integers(0, VOCAB, 20).tolist()
    choices = mx.argmax(model(mx.array([other]))[0], axis=-1)
    drafter = Scripted(mx.concatenate([mx.array([0]), choices.astype(mx.int32)]))
    assert acceptance(drafter, target, [other]) == (1, 0)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(
    ("words", "name", "said", "change"),
    [
        ("a rotary base of 10000", "EAGLE-3, speculators", {}, {"rope_parameters": None}),
        (
            "a rotary base of 10000",
            "EAGLE-3, the authors'",
            {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
            {"rope_theta": None, "rope_scaling": None},
        ),
        (
            "a rotary base of 10000",
            "EAGLE-3, the authors'",
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": None},
        ),
        ("norm_before_residual false", "EAGLE-3, speculators", {}, {"norm_before_residual": False}),
        ("norm_output false", "EAGLE-3.1", {}, {"norm_output": False}),
    ],
)
def test_a_reading_is_what_other_files_would_say(
    words: str, name: str, said: dict[str, object], change: dict[str, object], quantised: bool,
    model: nn.Module, tmp_path: Path,
) -> None:  # fmt: skip
    target = Target(model)
    sample = replace(SAMPLES[name], config={**SAMPLES[name].config, **said})
    tensors = random_tensors(sample)
    stored, other = (
        loaded(write_files(tmp_path / name, each, tensors), target, quantised)
        for name, each in (
            ("stored", sample),
            ("other", replace(sample, config={**sample.config, **change})),
        )
    )
    features = np.random.default_rng(0).normal(size=(9, 4 * HIDDEN))
    text = seen(range(20, 30), features, 0, 9, 9)
    read, want, unchanged = (
        logits_of_two_levels(drafter, text) for drafter in (stored.readings()[words], other, stored)
    )
    assert mx.array_equal(read, want)
    assert not mx.allclose(read, unchanged, atol=1e-3)


def logits_of_two_levels(drafter: EagleDrafter, text: Seen) -> mx.array:
    levels = drafter.levels(drafter.empty(1), text, 2)
    return mx.concatenate([levels.first(), levels.following(mx.array([[0]]), mx.array([[7]]))])


def loaded(folder: Path, target: Target, quantised: bool) -> EagleDrafter:
    drafter = load(folder, target)
    if not quantised:
        return drafter
    nn.quantize(
        drafter.module,
        group_size=32,
        bits=8,
        class_predicate=lambda _, m: isinstance(m, nn.Linear) and m.weight.shape[-1] % 32 == 0,
    )
    return EagleDrafter("quantised", drafter.module, target, drafter.rows.vocabulary)
