"""The drafter against a NumPy reference, and its folder on disk."""

from __future__ import annotations

import gc
import json
import struct
import weakref
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from references import silu
from tiny import HIDDEN, VOCAB, load_drafter, random_drafter, random_model, tiny_source

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.recurrent import RecurrentDrafter, save_drafter
from redrafter_mlx.errors import DamagedFileError, MismatchError, ModelNotFoundError
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.speculation.static_tree import StaticTree
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.files.tensors import StoredTensors

PAPER_KEYS = {
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "exit_dim": 48,
    "num_draft_layers": 2,
    "num_lookback_tokens": 0,
    "rnn": True,
}


@pytest.mark.parametrize("rnn", [True, False])
@pytest.mark.parametrize("exit_dim", [48, 2 * HIDDEN])
def test_logits_equal_the_papers_formula(rnn: bool, exit_dim: int) -> None:
    """s' = silu(W e + U s + b), or s + e; then projection, residual blocks, output matrix."""
    drafter = random_drafter(rnn=rnn, exit_dim=exit_dim)
    w = {name: np.array(a) for name, a in tree_flatten(drafter.parameters())}
    rng = np.random.default_rng(0)
    e, s, context = rng.normal(size=(3, 5, HIDDEN)).astype(np.float32)
    state = s + e
    if rnn:
        state = silu(e @ w["rnn_w.weight"].T + s @ w["rnn_u.weight"].T + w["rnn_u.bias"])
    x = np.concatenate([context, state], axis=-1)
    if exit_dim != 2 * HIDDEN:
        x = x @ w["input_proj.weight"].T + w["input_proj.bias"]
    for i in range(2):
        x = x + silu(x @ w[f"lm_head.{i}.linear.weight"].T + w[f"lm_head.{i}.linear.bias"])
    want = x @ w["lm_head.2.weight"].T

    got_state = drafter.advance(mx.array(s), mx.array(e))
    got = drafter.lm_head[-1](drafter.features(mx.array(context), got_state))
    np.testing.assert_allclose(got_state, state, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_tied_head_reads_the_targets_rows_of_the_draft_vocabulary() -> None:
    target = Target(random_model("llama (mistral-style)"))
    drafter = random_drafter(head="tied", exit_dim=HIDDEN, draft_vocab_size=3)
    drafter.draft_vocab = mx.array([9, 0, 96])
    bound = drafter.bind(target)
    context, state = mx.random.normal((2, 1, 1, HIDDEN))
    features = drafter.features(context, state)
    want = target.output_rows()(features)[..., mx.array([9, 0, 96])]
    np.testing.assert_allclose(bound.logits(context, state), want, rtol=1e-4, atol=1e-5)
    assert bound.vocabulary.to_tokens(mx.array([[2, 0]])).tolist() == [[96, 9]]


def write_papers_folder(folder: Path, **changes: object) -> None:
    """Write a folder as the paper's code does, tensor by tensor, with transformers' keys."""
    rng = np.random.default_rng(0)
    shapes = {
        "input_proj.weight": (48, 2 * HIDDEN),
        "input_proj.bias": (48,),
        "lm_head.0.linear.weight": (48, 48),
        "lm_head.0.linear.bias": (48,),
        "lm_head.1.linear.weight": (48, 48),
        "lm_head.1.linear.bias": (48,),
        "lm_head.2.weight": (VOCAB, 48),
        "rnn_u.weight": (HIDDEN, HIDDEN),
        "rnn_u.bias": (HIDDEN,),
        "rnn_w.weight": (HIDDEN, HIDDEN),
    }
    tensors = {k: mx.array(rng.normal(size=s).astype(np.float32)) for k, s in shapes.items()}
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    keys = {
        **PAPER_KEYS,
        "architectures": ["Drafter"],
        "model_type": "recurrent_drafting_drafter",
        "torch_dtype": "float32",
        "transformers_version": "4.38.2",
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(keys))


def test_a_folder_of_the_papers_code_loads(tmp_path: Path) -> None:
    write_papers_folder(tmp_path)
    drafter = load_drafter(tmp_path, Target(random_model()))
    stored = mx.load(str(tmp_path / "model.safetensors"))
    for name, array in tree_flatten(drafter.parameters()):
        assert mx.array_equal(array, stored[name]), name  # type: ignore[index]


@pytest.mark.parametrize("head", ["lm_heads.", "0."])
def test_the_names_that_tensorrt_llm_reads_are_the_same_drafter(tmp_path: Path, head: str) -> None:
    write_papers_folder(tmp_path)
    weights = tmp_path / "model.safetensors"
    stored = dict(mx.load(str(weights)))  # type: ignore[arg-type]
    mx.eval(stored)
    other = {n.replace("lm_head.", head).replace("input_proj.", "input_projs."): a
             for n, a in stored.items()}  # fmt: skip
    mx.save_safetensors(str(weights), other)
    drafter = DrafterFolder(tmp_path).bind(Target(random_model()), None)  # type: ignore[arg-type]
    assert isinstance(drafter, RecurrentDrafter)
    for name, array in tree_flatten(drafter.module.parameters()):
        assert mx.array_equal(array, stored[name]), name


def test_a_tensor_that_is_stored_under_two_names_is_refused(tmp_path: Path) -> None:
    write_papers_folder(tmp_path)
    weights = tmp_path / "model.safetensors"
    stored = dict(mx.load(str(weights)))  # type: ignore[arg-type]
    mx.eval(stored)
    twice = {**stored, "input_projs.weight": stored["input_proj.weight"] + 1}
    mx.save_safetensors(str(weights), twice)
    with pytest.raises(DamagedFileError, match=r"input_proj\.weight under several names"):
        load_drafter(tmp_path, Target(random_model()))


def test_a_draft_vocabulary_in_any_integers_is_the_same_drafter(tmp_path: Path) -> None:
    save_drafter(random_drafter(draft_vocab_size=3), tmp_path)
    weights = tmp_path / "model.safetensors"
    stored = dict(mx.load(str(weights)))  # type: ignore[arg-type]
    mx.eval(stored)
    mx.save_safetensors(str(weights), {**stored, "draft_vocab": mx.array([9, 0, 96], mx.uint64)})
    tokens = load_drafter(tmp_path, Target(random_model())).draft_vocab
    assert (tokens.dtype, tokens.tolist()) == (mx.int32, [9, 0, 96])


def test_what_is_saved_without_extensions_is_the_papers_format(tmp_path: Path) -> None:
    save_drafter(random_drafter(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    extensions = {"head", "model_type"}
    assert {k: v for k, v in config.items() if k not in extensions} == PAPER_KEYS
    write_papers_folder(tmp_path / "theirs")
    theirs = mx.load(str(tmp_path / "theirs" / "model.safetensors"))
    ours = mx.load(str(tmp_path / "model.safetensors"))
    assert {k: a.shape for k, a in ours.items()} == {k: a.shape for k, a in theirs.items()}  # type: ignore[union-attr]
    assert [p.name for p in tmp_path.glob(".*")] == [], "nothing half-written is left"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rnn": False},
        {"head": "tied", "exit_dim": HIDDEN, "draft_vocab_size": 10},
        {"exit_dim": 2 * HIDDEN, "num_draft_layers": 0},
        {"target": "tiny", "target_fingerprint": "sha256:1", "draft_length": 3},
    ],
)
def test_saving_and_loading_gives_the_same_drafter(tmp_path: Path, changes: dict) -> None:
    drafter = random_drafter(**changes)
    save_drafter(drafter, tmp_path)
    again = load_drafter(tmp_path, Target(random_model()))
    assert again.config == drafter.config
    for (name, a), (_, b) in zip(
        tree_flatten(drafter.parameters()), tree_flatten(again.parameters()), strict=True
    ):
        assert mx.array_equal(a, b), name


def test_a_save_that_was_killed_leaves_nothing_to_publish_after_the_next_one(
    tmp_path: Path,
) -> None:
    (tmp_path / ".saving-killed").mkdir()
    (tmp_path / ".saving-killed" / "model.safetensors").write_bytes(b"half")
    save_drafter(random_drafter(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_mismatch_is_refused_before_any_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoredTensors, "read", None)
    save_drafter(random_drafter(), tmp_path)
    target = Target(random_model())
    cases = [
        ({"hidden_size": 64}, r"hidden size is 64, the target's is 32"),
        ({"vocab_size": 500}, r"vocabulary is 500, the target's is 97"),
        ({"target": "other", "target_fingerprint": "sha256:a"}, r"other \(sha256:a\).*tiny.*:b"),
    ]
    source = tiny_source(fingerprint="sha256:b")
    for changes, message in cases:
        (tmp_path / "config.json").write_text(json.dumps({**PAPER_KEYS, **changes}))
        with pytest.raises(MismatchError, match=message):
            DrafterFolder(tmp_path, source).load(target)


def rewrite(path: Path, change: object) -> None:
    tensors = dict(mx.load(str(path)))  # type: ignore[arg-type]
    mx.eval(*tensors.values())
    change(tensors)  # type: ignore[operator]
    mx.save_safetensors(str(path), tensors)


def truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json holds no JSON object"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "config.json cannot be read"),
        (
            lambda f: (f / "config.json").write_text(json.dumps({**PAPER_KEYS, "exit_dims": 3})),
            "config.json: unknown drafter key 'exit_dims'; did you mean 'exit_dim'",
        ),
        (lambda f: (f / "config.json").write_text('{"rnn": true}'), "'hidden_size' is missing"),
        (
            lambda f: (f / "config.json").write_text(json.dumps({**PAPER_KEYS, "exit_dim": -1})),
            "exit_dim is -1",
        ),
        (
            lambda f: rewrite(f / "model.safetensors", lambda t: t.pop("rnn_u.bias")),
            r"model.safetensors lacks tensor rnn_u.bias of shape \[32\]",
        ),
        (
            lambda f: rewrite(
                f / "model.safetensors", lambda t: t.update({"rnn_u.bias": mx.zeros(3)})
            ),
            r"tensor rnn_u.bias has shape \[3\], config.json asks for \[32\]",
        ),
        (
            lambda f: rewrite(f / "model.safetensors", lambda t: t.update({"extra": mx.zeros(3)})),
            "holds tensor extra",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda f: truncate(f / "model.safetensors"), "model.safetensors is truncated"),
        (
            lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}"),
            "model.safetensors is truncated",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors is truncated"),
    ],
)
def test_damage_is_one_line_that_names_the_file(
    tmp_path: Path, damage: object, message: str
) -> None:
    save_drafter(random_drafter(), tmp_path)
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(DamagedFileError, match=message) as caught:
        load_drafter(tmp_path, Target(random_model()))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2, 97], "draft_vocab.*0 to 96"),
        ([1, -2, 3], "draft_vocab"),
        ([1, 2, 2], "draft_vocab"),
        ([1.0, 2.0, 3.0], "draft_vocab"),
    ],
)
def test_a_draft_vocabulary_of_impossible_tokens_is_refused(
    tmp_path: Path, tokens: list, message: str
) -> None:
    save_drafter(random_drafter(draft_vocab_size=3), tmp_path)
    weights = tmp_path / "model.safetensors"
    rewrite(weights, lambda t: t.update({"draft_vocab": mx.array(tokens)}))
    with pytest.raises(DamagedFileError, match=message):
        load_drafter(tmp_path, Target(random_model()))


def test_a_drafter_computes_in_its_targets_arithmetic(tmp_path: Path) -> None:
    save_drafter(random_drafter(draft_vocab_size=3), tmp_path)
    model = random_model()
    model.set_dtype(mx.bfloat16)
    drafter = load_drafter(tmp_path, Target(model))
    kinds = {name: array.dtype for name, array in tree_flatten(drafter.parameters())}
    assert kinds.pop("draft_vocab") == mx.int32
    assert set(kinds.values()) == {mx.bfloat16}


def test_no_folder_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no drafter at .*nowhere"):
        load_drafter(tmp_path / "nowhere", Target(random_model()))
    with pytest.raises(ModelNotFoundError, match=r"config\.json is missing"):
        load_drafter(tmp_path, Target(random_model()))


def test_the_draft_vocabulary_is_not_trained() -> None:
    drafter = random_drafter(draft_vocab_size=10)
    names = {name for name, _ in tree_flatten(drafter.trainable_parameters())}
    assert "draft_vocab" not in names
    assert "rnn_w.weight" in names


@pytest.mark.parametrize("tree", [None, StaticTree(((0,), (0, 0)))], ids=["beams", "a tree"])
def test_a_drafter_that_is_let_go_frees_its_target_at_once(tree: StaticTree | None) -> None:
    """Without a collection of reference cycles: two models at once may not fit."""
    target = Target(random_model())
    drafter = random_drafter().bind(target)
    if tree is not None:
        drafter = drafter.along(tree)
    decoder = Decoder(target, drafter, tree.shape if tree else BeamShape(2, 3), SamplingParams())
    for _ in decode(decoder, decoder.new_cache(), 0, [1, 2, 3], sequence_keys(0), lambda _: True):
        pass
    alive = weakref.ref(target)
    gc.collect()
    gc.disable()
    try:
        del target, drafter, decoder
        assert alive() is None
    finally:
        gc.enable()
