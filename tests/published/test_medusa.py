"""Medusa heads: every published layout, compared with the formula, and exact output."""

from __future__ import annotations

import json
from pathlib import Path

import chained_target
import mlx.core as mx
import numpy as np
import pytest
from decoding import run
from draft_models import drafter_for
from joint import fits, tiny_target
from joint import small_buffers as small_buffers
from medusa_files import AUTHORS, HEADS, authors_tensors, expected
from mlx.utils import tree_flatten
from tiny import HIDDEN, VOCAB, byte_model, byte_tokenizer, plain_tokens, random_model

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.combined import Combined
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.files.recognition import holds_drafter
from redrafter_mlx.drafting.published.heads.medusa import MedusaDrafter
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError, DamagedFileError, MismatchError
from redrafter_mlx.loading.load import load
from redrafter_mlx.speculation.static_tree import StaticTree
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.files.tensors import StoredTensors

PROMPT = [3, 5, 7, 11, 4]
TOKEN_MAP = [90, 3, 17, 4, 55, 8, 61, 33, 2, 96]


def write(folder: Path, tensors: dict[str, mx.array], **config: object) -> Path:
    """Write a drafter's folder with this config.json."""
    folder.mkdir(exist_ok=True)
    name = "model" if "num_hidden_layers" in config else "medusa_lm_head"
    mx.save_safetensors(str(folder / f"{name}.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(folder: Path, target: Target) -> MedusaDrafter:
    drafter = DrafterFolder(folder).bind(target, None)  # type: ignore[arg-type]
    assert isinstance(drafter, MedusaDrafter)
    return drafter


def random_heads(folder: Path, target: Target, **changes: int) -> MedusaDrafter:
    tensors = authors_tensors(D=target.hidden_size, V=target.vocab_size, **changes)
    return loaded(write(folder, tensors), target)


def check_logits(drafter: MedusaDrafter, want: list[np.ndarray], hidden: np.ndarray) -> None:
    """Check that three levels equal `want`, and that later levels are the same for every beam."""
    levels = drafter.levels_of(mx.array(hidden), mx.array([3, 5]), HEADS)
    np.testing.assert_allclose(levels.first()[:, 0], want[0], rtol=1e-4, atol=1e-4)
    for level in want[1:]:
        got = levels.following(mx.array([[0, 0], [0, 0]]), mx.array([[1, 2], [3, 4]]))
        for beam in range(2):
            np.testing.assert_allclose(got[:, beam], level, rtol=1e-4, atol=1e-4)


def vllms_names(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the tensors under vLLM's names."""
    named = {}
    for name, array in tensors.items():
        k, layer, *rest = name.split(".")
        own = (
            f"blocks.{k}.layers.{layer}.{rest[-1]}"
            if rest[0] == "linear"
            else f"lm_heads.{k}.weight"
        )
        named[own] = array
    return named


VLLM = {
    "model_type": "medusa", "hidden_size": HIDDEN, "num_heads": HEADS, "num_hidden_layers": 1,
    "vocab_size": VOCAB, "truncated_vocab_size": VOCAB, "max_paths": 64, "topk": 10,
}  # fmt: skip


@pytest.mark.parametrize("layers", [1, 2])
def test_the_authors_heads_are_counted_and_compute_the_formula(tmp_path: Path, layers: int) -> None:
    """config.json states 2 heads, as that of the authors' Vicuna-7B does."""
    tensors = authors_tensors(layers)
    drafter = loaded(write(tmp_path, tensors, **AUTHORS), Target(random_model()))
    assert drafter.max_length == drafter.trained_length == HEADS + 1
    hidden = np.random.default_rng(1).normal(size=(2, HIDDEN)).astype(np.float32)
    check_logits(drafter, [expected(tensors, hidden, k) for k in range(HEADS)], hidden)


def test_heads_without_an_output_matrix_share_the_targets(tmp_path: Path) -> None:
    """The second layout of the authors' training code and of text-generation-inference."""
    tensors = {n: a for n, a in authors_tensors().items() if "linear" in n}
    model = random_model("llama (mistral-style)")
    drafter = loaded(write(tmp_path, tensors, **AUTHORS, version="2"), Target(model))
    hidden = np.random.default_rng(1).normal(size=(2, HIDDEN)).astype(np.float32)
    want = [expected(tensors, hidden, k, model.lm_head.weight) for k in range(HEADS)]
    check_logits(drafter, want, hidden)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("biases", [True, False])
def test_vllms_heads_have_biases_where_they_are_stored(
    tmp_path: Path, biases: bool, prefix: str
) -> None:
    tensors = {n: a for n, a in authors_tensors().items() if biases or "bias" not in n}
    stored = {prefix + n: a for n, a in vllms_names(tensors).items()}
    folder = write(tmp_path, stored, **VLLM, medusa_fc_bias=biases)
    assert holds_drafter(folder)
    hidden = np.random.default_rng(1).normal(size=(2, HIDDEN)).astype(np.float32)
    want = [expected(tensors, hidden, k) for k in range(HEADS)]
    check_logits(loaded(folder, Target(random_model())), want, hidden)


@pytest.mark.parametrize("name", ["lm_heads.0.weight", "lm_head.weight"])
def test_vllms_shared_matrix_serves_every_head(tmp_path: Path, name: str) -> None:
    tensors = authors_tensors()
    shared = tensors["0.1.weight"]
    stored = {n: a for n, a in vllms_names(tensors).items() if "lm_heads" not in n}
    folder = write(tmp_path, {**stored, name: shared}, **VLLM, original_lm_head=True)
    hidden = np.random.default_rng(1).normal(size=(2, HIDDEN)).astype(np.float32)
    want = [expected(tensors, hidden, k, shared) for k in range(HEADS)]
    check_logits(loaded(folder, Target(random_model())), want, hidden)


@pytest.mark.parametrize("cut", [True, False], ids=["rows are cut", "all rows"])
def test_vllms_token_map_says_what_each_output_stands_for(tmp_path: Path, cut: bool) -> None:
    tensors = vllms_names(authors_tensors())
    chosen = mx.array(TOKEN_MAP, mx.int64)
    stored = {n: a[chosen] if cut and "lm_heads" in n else a for n, a in tensors.items()}
    config = {**VLLM, "truncated_vocab_size": len(TOKEN_MAP)}
    folder = write(tmp_path, {**stored, "token_map": chosen}, **config)
    model = random_model()
    target = Target(model)
    drafter = loaded(folder, target)
    assert drafter.max_width == len(TOKEN_MAP)
    hidden = np.random.default_rng(1).normal(size=(2, HIDDEN)).astype(np.float32)
    own = authors_tensors()
    check_logits(drafter, [expected(own, hidden, k)[:, TOKEN_MAP] for k in range(HEADS)], hidden)
    for params in (SamplingParams(), SamplingParams(0.9)):
        decoder = Decoder(target, drafter, BeamShape(3, 4), params)
        plain = Decoder(target, None, BeamShape(1, 1), params)
        assert run(decoder, PROMPT, 30)[0] == run(plain, PROMPT, 30)[0]


def test_a_token_map_of_the_whole_vocabulary_is_not_used(tmp_path: Path) -> None:
    """As in vLLM, whose files always have a token map."""
    tensors = {**vllms_names(authors_tensors()), "token_map": mx.arange(VOCAB)[::-1]}
    drafter = loaded(write(tmp_path, tensors, **VLLM), Target(random_model()))
    hidden = np.random.default_rng(1).normal(size=(2, HIDDEN)).astype(np.float32)
    check_logits(drafter, [expected(authors_tensors(), hidden, k) for k in range(HEADS)], hidden)


def medusa_two(folder: Path) -> Path:
    """Write a whole model that contains heads, as Medusa-2's training does, and a tokenizer."""
    model = byte_model()
    heads = {f"medusa_head.{n}": a for n, a in authors_tensors(V=258).items()}
    trunk = dict(tree_flatten(model.parameters()))
    sizes = {k: v for k, v in vars(model.args).items() if v is not None}
    write(folder, {**trunk, **heads}, **sizes)
    byte_tokenizer()._tokenizer.save_pretrained(folder)
    return folder


def test_the_heads_of_a_whole_model_load_from_its_folder(tmp_path: Path) -> None:
    folder = medusa_two(tmp_path / "medusa-2")
    assert holds_drafter(folder)
    drafter = loaded(folder, Target(byte_model()))
    tensors = authors_tensors(V=258)
    hidden = np.random.default_rng(1).normal(size=(2, HIDDEN)).astype(np.float32)
    check_logits(drafter, [expected(tensors, hidden, k) for k in range(HEADS)], hidden)


def test_a_whole_model_is_the_target_of_its_own_heads(tmp_path: Path) -> None:
    folder = medusa_two(tmp_path / "medusa-2")
    redrafter = load(folder, folder)
    assert isinstance(redrafter.drafter, MedusaDrafter)
    prompt = list(b"hello")
    answer = redrafter.generate(prompt, max_tokens=20, beam_width=2, beam_length=3)
    assert answer.token_ids == plain_tokens(byte_model(), prompt, 20)


def exact_heads(folder: Path, target: Target) -> MedusaDrafter:
    """Return heads for the chained target; head k reads the state before the root: k + 2 ahead."""
    tensors = {}
    for k in range(HEADS):
        tensors[f"{k}.0.linear.weight"] = mx.zeros((HIDDEN, HIDDEN))
        tensors[f"{k}.0.linear.bias"] = mx.zeros(HIDDEN)
        tensors[f"{k}.1.weight"] = chained_target.predicting(k + 2, HIDDEN)
    return loaded(write(folder, tensors, **AUTHORS), target)


@pytest.mark.parametrize("shape", [BeamShape(1, 4), BeamShape(3, 4), BeamShape(2, 8)], ids=str)
def test_exact_heads_are_accepted_whole(tmp_path: Path, shape: BeamShape) -> None:
    model = chained_target.chained_model()
    target = Target(model)
    drafter = exact_heads(tmp_path, target)
    emitted, results = run(Decoder(target, drafter, shape, SamplingParams()), PROMPT, 60)
    assert emitted == plain_tokens(model, PROMPT, 60)
    assert {len(r.tokens) for r in results[1:]} == {HEADS + 1}
    chain = StaticTree(((0,), (0, 0), (1,)))
    along = Decoder(target, drafter.along(chain), chain.shape, SamplingParams())
    assert {len(r.tokens) for r in run(along, PROMPT, 30)[1][1:]} == {3}


def test_beside_a_drafter_that_remembers_heads_read_the_newest_of_several_positions(
    tmp_path: Path,
) -> None:
    """If the beams are longer than the number of heads, the other drafter continues alone."""
    target = Target(chained_target.chained_model())
    other = drafter_for(target, random_model(vocab_size=chained_target.V))
    both = Combined(other, exact_heads(tmp_path, target))
    decoder = Decoder(target, both, BeamShape(2, 6), SamplingParams())
    _, results = run(decoder, PROMPT, 40)
    assert {len(r.tokens) for r in results[1:]} == {HEADS + 1}


def test_automatic_shapes_lookup_and_bits_keep_the_text(tmp_path: Path) -> None:
    tensors = authors_tensors(D=64, V=258)
    model = byte_model(hidden_size=64)
    write(tmp_path, tensors)
    prompt = list(b"abcabcabc")
    redrafter = Redrafter(
        model, byte_tokenizer(), DrafterFolder(tmp_path), host_drafters=(Lookup(3),)
    )
    assert redrafter.drafting == "Medusa and lookup"
    plain = plain_tokens(model, prompt, 40)
    assert redrafter.generate(prompt, max_tokens=40).token_ids == plain
    quantised = DrafterFolder(tmp_path, bits=4)
    assert Redrafter(model, byte_tokenizer(), quantised).generate(
        prompt, max_tokens=40, beam_width=2, beam_length=3
    ).token_ids == plain  # fmt: skip


def test_no_shape_is_longer_than_the_heads_draft(tmp_path: Path) -> None:
    """With prompt lookup a shape may be longer: copies of the text have any length."""
    write(tmp_path, authors_tensors(V=258))
    model = byte_model()
    alone = Redrafter(model, byte_tokenizer(), DrafterFolder(tmp_path))
    assert alone.tuning is not None
    shapes = alone.tuning.statistics().shapes
    assert max(shape.length for shape in shapes) == HEADS + 1
    with pytest.raises(BadInputError, match="beam_length is 5; Medusa drafts beams of up to 4"):
        alone.generate([1, 2], beam_width=2, beam_length=5)
    beside = Redrafter(model, byte_tokenizer(), DrafterFolder(tmp_path), host_drafters=(Lookup(3),))
    answer = beside.generate([1, 2, 1, 2], max_tokens=20, beam_width=2, beam_length=8)
    assert answer.token_ids == plain_tokens(model, [1, 2, 1, 2], 20)


@pytest.mark.usefixtures("small_buffers")
def test_rejection_keeps_the_targets_distribution(tmp_path: Path) -> None:
    _, target = tiny_target()
    drafter = random_heads(tmp_path, target)
    assert drafter.can_draw
    params = SamplingParams(1.0, accept="rejection")
    assert fits(BeamShape(3, 3), params, batches=2, drafter=drafter)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"D": 16}, "hidden size is 16, the target's is 32"),
        ({"V": 50}, "vocabulary is 50, the target's is 97"),
    ],
)
def test_a_wrong_pair_is_refused_before_weights_are_read(
    tmp_path: Path, sizes: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, authors_tensors(**sizes))
    monkeypatch.delattr(StoredTensors, "read")
    with pytest.raises(MismatchError, match=message):
        loaded(tmp_path, Target(random_model()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"3.0.linear.bias": mx.zeros(HIDDEN)}, r"lacks tensor heads\.3"),
        ({"0.0.other": mx.zeros(3)}, r"holds tensor 0\.0\.other"),
        ({"1.0.linear.weight": mx.zeros((HIDDEN, 3))}, r"heads\.1\.blocks\.0\.linear\.weight has"),
        ({"0.0.linear.weight": mx.zeros(3)}, "lacks the matrix of its first"),
    ],
)
def test_tensors_that_are_no_heads_are_refused(
    tmp_path: Path, change: dict[str, mx.array], message: str
) -> None:
    write(tmp_path, {**authors_tensors(), **change})
    with pytest.raises(DamagedFileError, match=message):
        loaded(tmp_path, Target(random_model()))


@pytest.mark.parametrize("tokens", [[5, 5], [5, 97]])
def test_a_token_map_of_impossible_tokens_is_refused(tmp_path: Path, tokens: list[int]) -> None:
    write(tmp_path, {**vllms_names(authors_tensors()), "token_map": mx.array(tokens)})
    with pytest.raises(DamagedFileError, match="token_map"):
        loaded(tmp_path, Target(random_model()))
