"""IBM's MLP speculator against its formula, its files, and its output."""

from __future__ import annotations

import json
from pathlib import Path

import chained_target
import mlx.core as mx
import numpy as np
import pytest
from decoding import run
from mlp_speculator_files import HEADS, INNER, config_of, expected, stored_tensors
from tiny import HIDDEN, VOCAB, plain_tokens, random_model

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.published.heads.mlp_speculator import SpeculatorDrafter
from redrafter_mlx.errors import DamagedFileError, MismatchError
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.files.tensors import StoredTensors

PROMPT = [3, 5, 7, 11, 4]


def write(folder: Path, tensors: dict[str, mx.array], prefix: str = "", **changes: object) -> Path:
    mx.save_safetensors(
        str(folder / "model.safetensors"), {prefix + n: a for n, a in tensors.items()}
    )
    (folder / "config.json").write_text(json.dumps(config_of(**changes)))
    return folder


def loaded(folder: Path, target: Target) -> SpeculatorDrafter:
    drafter = DrafterFolder(folder).bind(target, None)  # type: ignore[arg-type]
    assert isinstance(drafter, SpeculatorDrafter)
    return drafter


@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prefix", ["", "speculator."])
def test_logits_of_three_levels_equal_the_formula(
    tmp_path: Path, tied: bool, scale_input: bool, prefix: str
) -> None:
    """Along two beams that differ after the root and swap places after the next token."""
    tensors = stored_tensors(tied=tied)
    folder = write(tmp_path, tensors, prefix, tie_weights=tied, scale_input=scale_input)
    drafter = loaded(folder, Target(random_model()))
    hidden = 3 * np.random.default_rng(1).normal(size=(2, HIDDEN)).astype(np.float32)
    roots, first, second = [3, 50], [[8, 9], [1, 2]], [[4, 5], [96, 0]]
    levels = drafter.levels_of(mx.array(hidden), mx.array(roots), HEADS)
    got = [
        levels.first(),
        levels.following(mx.zeros((2, 2), mx.int32), mx.array(first)),
        levels.following(mx.array([[1, 0], [1, 0]]), mx.array(second)),
    ]
    for b, root in enumerate(roots):
        for w in range(2):
            path = [root, first[b][1 - w], second[b][w]]
            for level, beam in ((0, 0), (1, 1 - w), (2, w)):
                want = expected(tensors, hidden[b], path[: level + 1], scale_input, INNER)
                np.testing.assert_allclose(got[level][b, beam], want, rtol=1e-4, atol=1e-4)


def test_tied_weights_may_be_stored_once(tmp_path: Path) -> None:
    tensors = stored_tensors(tied=True)
    once = {n: a for n, a in tensors.items() if ".0." in n or n == "proj.1.weight"}
    hidden, root = mx.random.normal((1, HIDDEN)), mx.array([3])
    found = []
    for name, stored in (("each", tensors), ("once", once)):
        (tmp_path / name).mkdir()
        folder = write(tmp_path / name, stored, tie_weights=True)
        levels = loaded(folder, Target(random_model())).levels_of(hidden, root, HEADS)
        levels.first()
        found.append(levels.following(mx.array([[0]]), mx.array([[5]])))
    assert mx.array_equal(*found)


def test_an_inner_size_of_zero_is_that_of_the_target(tmp_path: Path) -> None:
    tensors = stored_tensors(D=HIDDEN)
    drafter = loaded(write(tmp_path, tensors, inner_dim=0), Target(random_model()))
    hidden = np.ones(HIDDEN, np.float32)
    got = drafter.levels_of(mx.array(hidden[None]), mx.array([7]), 1).first()
    want = expected(tensors, hidden, [7], False, HIDDEN)
    np.testing.assert_allclose(got[0, 0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("knows", ["tokens", "state"])
def test_an_exact_speculator_is_accepted_whole(tmp_path: Path, knows: str) -> None:
    """One speculator reads the last drafted token, the other the state before the root."""
    model = chained_target.chained_model()
    V, unit = chained_target.V, mx.eye(chained_target.V, HIDDEN)
    of_tokens = knows == "tokens"
    tensors = {}
    for i in range(HEADS):
        tensors[f"emb.{i}.weight"] = unit if of_tokens else mx.zeros_like(unit)
        tensors[f"proj.{i}.weight"] = (0 if of_tokens else 1) * mx.eye(HIDDEN)
        tensors[f"head.{i}.weight"] = chained_target.predicting(1 if of_tokens else i + 2, HIDDEN)
        tensors[f"ln.{i}.weight"], tensors[f"ln.{i}.bias"] = mx.ones(HIDDEN), mx.zeros(HIDDEN)
    target = Target(model)
    drafter = loaded(write(tmp_path, tensors, inner_dim=0, vocab_size=V), target)
    assert drafter.max_length == HEADS + 1
    for shape in (BeamShape(1, 4), BeamShape(3, 8)):
        decoder = Decoder(target, drafter, shape, SamplingParams())
        emitted, results = run(decoder, PROMPT, 40)
        assert emitted == plain_tokens(model, PROMPT, 40)
        assert {len(r.tokens) for r in results[1:]} == {HEADS + 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"emb_dim": 64}, "hidden size is 64, the target's is 32"),
        ({"vocab_size": 50}, "vocabulary is 50, the target's is 97"),
    ],
)
def test_a_wrong_pair_is_refused_before_weights_are_read(
    tmp_path: Path, changes: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, stored_tensors(), **changes)
    monkeypatch.delattr(StoredTensors, "read")
    with pytest.raises(MismatchError, match=message):
        loaded(tmp_path, Target(random_model()))


@pytest.mark.parametrize(
    ("tensor", "config", "message"),
    [
        ({"emb.3.weight": mx.zeros((VOCAB, INNER))}, {}, r"holds tensor emb\.3\.weight"),
        ({"ln.1.weight": mx.zeros(3)}, {}, r"ln\.1\.weight has shape \[3\]"),
        ({"more": mx.zeros(3)}, {"tie_weights": True}, "holds tensor more"),
        ({}, {"n_predict": 0}, "n_predict is 0"),
        ({}, {"n_predict": 4}, r"lacks tensor emb\.3\.weight"),
        ({}, {"tie_weights": "yes"}, "tie_weights is 'yes'"),
    ],
)
def test_damage_is_named(
    tmp_path: Path, tensor: dict[str, mx.array], config: dict[str, object], message: str
) -> None:
    write(tmp_path, {**stored_tensors(), **tensor}, **config)
    with pytest.raises(DamagedFileError, match=message):
        loaded(tmp_path, Target(random_model()))
