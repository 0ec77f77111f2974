"""Gemma 4's assistants: their equations over the target's keys, and what is typed."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from assistant_samples import (
    CANDIDATES,
    LARGE,
    SIZE,
    SMALL,
    VOCAB,
    Equations,
    Tensors,
    config_of,
    gemma,
    load,
    random_assistant,
    write_assistant,
)
from batches import FEW
from command_line import CommandLine
from draft_models import GREEDY, PROMPT, run
from drafter_laws import (
    conversation_says_what_a_plain_one_does,
    decoder_with,
    generated,
    rows_accept_what_they_would_alone,
)
from fake_hub import FakeHub
from fake_hub import hub as hub
from grammar_samples import grammars_say_what_plain_answers_say
from mlx.utils import tree_flatten
from tiny import byte_model, byte_tokenizer, plain_tokens, sliding_model
from trees import tree_for

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.distill.evaluation.questions import quality_on
from redrafter_mlx.drafting.cached_levels import chain
from redrafter_mlx.drafting.checked import bound
from redrafter_mlx.drafting.combined import Combined
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.interface import Seen
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import (
    BadInputError,
    DamagedFileError,
    MismatchError,
    RedrafterError,
    UnsupportedModelError,
)
from redrafter_mlx.speculation.accept import up_to
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.speculation.tree import TokenTree
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.profile import drafting_call
from redrafter_mlx.weights.files.tensors import StoredTensors
from redrafter_mlx.weights.precision import stored_bits

SHAPES = [BeamShape(1, 2), BeamShape(3, 4), BeamShape(4, 5, 9)]
PROMPTS, ROOTS = [[(7 * i + 3) % 90 for i in range(n)] for n in (21, 5)], (50, 60)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return gemma()


decoder_of = partial(decoder_with, load)


def after_paths(target: Target, tree: TokenTree, paths: list[list[int]]) -> tuple[Seen, TreeCache]:
    """Verify a tree after both prompts, and accept the nodes with these tokens from the root on.

    The prompts differ in length; the longer one is longer than the sliding window.
    """
    width = max(map(len, PROMPTS))
    cache, length = target.new_cache(), mx.array([*map(len, PROMPTS)])
    target.append(mx.array([p + [0] * (width - len(p)) for p in PROMPTS]), cache, 0)
    hidden, _ = target.verify(tree, cache, length, width)
    last = []
    for tokens, parents, path in zip(
        tree.tokens.tolist(), tree.parents.tolist(), paths, strict=True
    ):
        node, nodes = 0, [*enumerate(zip(tokens, parents, strict=True))]
        for token in path[1:]:
            (node,) = (i for i, found in nodes if found == (token, node))
        last.append(node)
    accepted = up_to(tree, mx.array(last), mx.array(ROOTS))
    length = cache.commit(tree, accepted.path, accepted.n_accepted, length)
    newest = mx.take_along_axis(hidden, mx.array(last)[:, None, None], axis=1)
    tokens = mx.array([[0, root] for root in ROOTS])
    return Seen(tokens, newest, length - 1, mx.ones((2,), mx.int32), width + 4), cache


@pytest.mark.parametrize("kind", [SMALL, LARGE])
@pytest.mark.parametrize("is_chain", [False, True])
def test_logits_of_three_levels_equal_the_equations(
    kind: str, is_chain: bool, tmp_path: Path
) -> None:
    """On trees, over the keys of paths that still lie among the nodes of the last tree."""
    model = gemma(kind)
    tensors = random_assistant(centroids=kind == SMALL)
    target = Target(model)
    drafter = load(write_assistant(tmp_path / "d", tensors), target)
    tree = chain(mx.array([[4, 10, 6, 7], [4, 5, 6, 3]])) if is_chain else tree_for(2)
    accepted = [[4, 10, 6], [4, 5]]
    seen, cache = after_paths(target, tree, accepted)
    caches = drafter.features.caches
    seen = replace(seen, committed=cache.committed(caches, seen.root_position, seen.bound))
    levels = drafter.levels((), seen, 3)
    outputs, paths, last = [levels.first()], [[]], [[]]
    for parents, new in (([0, 0, 0], [5, 60, 7]), ([2, 0, 2], [3, 3, 90])):
        last = [[*last[p], token] for p, token in zip(parents, new, strict=True)]
        paths += last
        outputs.append(levels.following(mx.array([parents] * 2), mx.array([new] * 2)))
    got = np.array(mx.concatenate(outputs, axis=1))
    equations = Equations(model, tensors)
    for b, root in enumerate(ROOTS):
        text = PROMPTS[b] + accepted[b]
        want = np.array([equations.logits(text, root, p)[-1] for p in paths])
        known = np.isfinite(want)
        assert known.mean() == 1 if kind == LARGE else known.sum() == 7 * CANDIDATES
        assert (np.isfinite(got[b]) == known).all()
        spread = np.std(want[known])
        assert spread > 0.3
        np.testing.assert_allclose(got[b][known], want[known], atol=1e-4 * spread)


def beside_oracle(folder: Path, model: nn.Module, shape: BeamShape) -> tuple[Decoder, list[int]]:
    """Return a decoder whose trees hold the text beside the assistant's drafts, and the text."""
    target, text = Target(model), PROMPT + plain_tokens(model, PROMPT, 80)
    both = Combined(Oracle(text, VOCAB), load(folder, target))
    return Decoder(target, both, shape, GREEDY), text


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [SMALL, LARGE])
def test_tokens_equal_autoregression(kind: str, shape: BeamShape, tmp_path: Path) -> None:
    model = gemma(kind)
    folder = write_assistant(tmp_path / "d", random_assistant(centroids=kind == SMALL))
    decoder, text = beside_oracle(folder, model, shape)
    for each in (decoder_of(folder, model, shape), decoder):
        said, results, _ = run(each, 60)
        assert said == text[len(PROMPT) :][:60]
    assert max(len(r.tokens) for r in results) > 2 or shape.width == 1


def test_drafts_depend_on_the_text_alone(model: nn.Module, tmp_path: Path) -> None:
    """Whether trees, chains, plain steps or a prompt led to it; nothing is remembered."""
    folder = write_assistant(tmp_path / "d", random_assistant())
    decoder, text = beside_oracle(folder, model, BeamShape(4, 4))
    cache, known, keys = decoder.new_cache(), len(PROMPT) + 1, sequence_keys(0)
    state, _ = decoder.start(cache, 0, [PROMPT], keys)
    for shape in 3 * [BeamShape(4, 4), BeamShape(2, 3), PLAIN, BeamShape(1, 4)]:
        state, report = decoder.step(state, known, shape)
        known += len(report.read()[0].tokens)
        fresh, _ = decoder.start(decoder.new_cache(), 0, [text[: known - 1]], keys, shape)
        got, want = state.drafts.tree, fresh.drafts.tree
        assert got.tokens.tolist() == want.tokens.tolist()
        assert got.parents.tolist() == want.parents.tolist()
    assert cache.memory == ((), ())
    assert known > len(PROMPT) + 20


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(1.0), SamplingParams(1.0, accept="rejection")], ids=str
)
def test_rows_that_join_and_leave_accept_what_they_would_alone(
    params: SamplingParams, tmp_path: Path
) -> None:
    model = gemma(vocab=FEW)
    folder = write_assistant(tmp_path / "d", random_assistant(centroids=False, vocab=FEW))
    decoder = decoder_of(folder, model, BeamShape(2, 4), params)
    rows_accept_what_they_would_alone(decoder, 3, params)


def test_beside_another_drafter_it_reads_its_own_keys(model: nn.Module, tmp_path: Path) -> None:
    """Two assistants together draft what each would draft with half of the beams."""
    target = Target(model)
    first, second = (
        load(write_assistant(tmp_path / f"{i}", random_assistant(seed=i)), target) for i in (0, 1)
    )
    both = Combined(first, second)
    decoder = Decoder(target, both, BeamShape(2, 3), GREEDY)
    said, _, _ = run(decoder, 20)
    assert said == plain_tokens(model, PROMPT, 20)
    state, _ = decoder.start(decoder.new_cache(), 0, [PROMPT], sequence_keys(0))
    drafted = {*map(tuple, state.drafts.tree.tokens[:, 1:].tolist())}
    alone = []
    for drafter in (first, second):
        state, _ = replace(decoder, drafter=drafter).start(
            decoder.new_cache(), 0, [PROMPT], sequence_keys(0), BeamShape(1, 3)
        )
        alone += state.drafts.tree.tokens[0, 1:].tolist()
    assert sorted(*drafted) == sorted(alone)


def test_conversations_say_what_plain_ones_do(model: nn.Module, tmp_path: Path) -> None:
    """Turns continue from the prefix cache, of which the assistant reads the keys."""
    drafter = load(write_assistant(tmp_path / "d", random_assistant()), Target(model))
    conversation_says_what_a_plain_one_does(model, drafter)


def test_answers_with_grammars_say_what_plain_ones_do(model: nn.Module, tmp_path: Path) -> None:
    drafter = load(write_assistant(tmp_path / "d", random_assistant()), Target(model))
    redrafter = Redrafter(model, byte_tokenizer(), drafter)
    grammars_say_what_plain_answers_say(redrafter)


def test_the_position_of_its_rows_is_a_reading(model: nn.Module, tmp_path: Path) -> None:
    """mlx-vlm takes the last committed position, and transformers the root's."""
    tensors, target = random_assistant(centroids=False), Target(model)
    drafter = load(write_assistant(tmp_path / "d", tensors), target)
    (other,) = drafter.readings().values()
    tree = tree_for(2)
    seen, cache = after_paths(target, tree, [[4, 10, 6], [4, 5]])
    caches = drafter.features.caches
    seen = replace(seen, committed=cache.committed(caches, seen.root_position, seen.bound))
    equations = Equations(model, tensors, ahead=1)
    got = other.levels((), seen, 1).first()  # type: ignore[attr-defined]
    for b, path in enumerate(([4, 10, 6], [4, 5])):
        want = equations.logits(PROMPTS[b] + path, ROOTS[b], [])[0]
        np.testing.assert_allclose(got[b, 0], want, atol=1e-4 * np.std(want))


def test_assistants_are_quantised_and_draft_alike(model: nn.Module, tmp_path: Path) -> None:
    """The rows of the embedding that its centroids choose are dequantised."""
    folder, target = write_assistant(tmp_path / "d", random_assistant(size=64)), Target(model)
    drafter = DrafterFolder(folder, bits=8).bind(target, byte_tokenizer())
    assert stored_bits(drafter.module) == 8  # type: ignore[arg-type]
    decoders = [
        Decoder(target, d, BeamShape(2, 3), GREEDY) for d in (drafter, load(folder, target))
    ]
    trees = []
    for decoder in decoders:
        said, _, _ = run(decoder, 12)
        assert said == plain_tokens(model, PROMPT, 12)
        state, _ = decoder.start(decoder.new_cache(), 0, [PROMPT], sequence_keys(0))
        trees.append(state.drafts.tree.tokens.tolist())
    assert trees[0] == trees[1]


def test_a_wrong_pair_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_assistant(tmp_path / "d", random_assistant())
    monkeypatch.setattr(StoredTensors, "read", lambda *_: pytest.fail("read"))
    wide = sliding_model("gemma4_text", vocab_size=VOCAB, hidden_size=48)
    with pytest.raises(MismatchError, match=r"32.*48"):
        load(folder, Target(wide))
    with pytest.raises(MismatchError, match=r"head size.*8.*16"):
        load(folder, Target(sliding_model("gemma4_text", vocab_size=VOCAB, head_dim=16)))
    with pytest.raises(UnsupportedModelError, match="llama"):
        load(folder, Target(byte_model()))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre_projection.weight": None}, r"no drafter"),
        ({"model.norm.weight": None}, r"norm\.weight"),
        ({"model.layers.1.self_attn.q_norm.weight": mx.ones((2, 2))}, r"layers\.1.*q_norm"),
        ({"model.layers.1.mlp.up_proj.weight": mx.zeros((2, 2))}, r"layers\.1\.mlp\.up_proj"),
        ({"masked_embedding.token_ordering": mx.zeros((VOCAB,), mx.int32)}, "token_ordering"),
        ({"masked_embedding.centroids.weight": mx.zeros((80, SIZE))}, "258.*80"),
    ],
    ids=str,
)
def test_damaged_files_name_the_tensor(
    changes: dict[str, mx.array | None], words: str, model: nn.Module, tmp_path: Path
) -> None:
    tensors = {**random_assistant(), **changes}
    stored: Tensors = {name: array for name, array in tensors.items() if array is not None}
    folder = write_assistant(tmp_path / "d", random_assistant())
    mx.save_safetensors(str(folder / "model.safetensors"), stored)
    with pytest.raises((DamagedFileError, UnsupportedModelError), match=words):
        load(folder, Target(model))


def test_no_value_of_a_config_ends_in_a_traceback(model: nn.Module, tmp_path: Path) -> None:
    target, tensors = Target(model), random_assistant()
    folder = write_assistant(tmp_path / "d", tensors)
    said = []
    for key in config_of(tensors)["text_config"]:  # type: ignore[attr-defined]
        for value in (-1, 10**400, "x", [], {}, None):
            (folder / "config.json").write_text(json.dumps(config_of(tensors, **{key: value})))
            try:
                load(folder, target)
            except RedrafterError as error:
                said.append(str(error))
    assert len(said) > 20
    assert "\n" not in "".join(said)


def test_its_drafting_can_be_timed(model: nn.Module, tmp_path: Path) -> None:
    target = Target(model)
    drafter = load(write_assistant(tmp_path / "d", random_assistant()), target)
    tokens, *_ = drafting_call(target, drafter, BeamShape(2, 3))()
    assert tokens.shape == (1, 5)


def test_it_needs_the_keys_of_all_ranks(model: nn.Module, tmp_path: Path) -> None:
    folder, target = write_assistant(tmp_path / "d", random_assistant()), Target(model)
    target.has_all_keys = False
    with pytest.raises(MismatchError, match="ranks"):
        bound(DrafterFolder(folder), target, byte_tokenizer())


def test_its_keys_are_not_stored_for_quality(model: nn.Module, tmp_path: Path) -> None:
    target = Target(model)
    drafter = load(write_assistant(tmp_path / "d", random_assistant()), target)
    with pytest.raises(BadInputError, match="bench --drafter"):
        [*quality_on({"d": drafter}, target, [], [], [])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder in the form of the Hub: its language model is one part of it."""
    model = gemma()
    folder = tmp_path_factory.mktemp("hub") / "tiny-gemma"
    byte_tokenizer().save_pretrained(folder)
    weights = dict(tree_flatten({"language_model": model.parameters()}))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    text = {**vars(model.args), "eos_token_id": 999}
    config = {"model_type": "gemma4", "text_config": text, "vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 999}))
    return folder


@pytest.mark.parametrize("more", [(), ("--temperature", "1", "--seed", "4")], ids=len)
def test_what_is_typed_says_what_plain_decoding_says(
    more: tuple[str, ...], folder: Path, tmp_path: Path, cli: CommandLine
) -> None:
    plain = generated(cli, folder, "none", *more)
    assistant = write_assistant(tmp_path / "assistant", random_assistant())
    shape = ("--beam-width", "2", "--beam-length", "3")
    drafted = generated(cli, folder, assistant, *more, *shape)
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["shapes"][0]["width"] == 2
    assert "Gemma 4 assistant" in cli.out("show", assistant)


def test_an_assistant_comes_from_the_hub(
    folder: Path, tmp_path: Path, hub: FakeHub, cli: CommandLine
) -> None:
    assistant = write_assistant(tmp_path / "a", random_assistant())
    hub.repos["org/a", "main"] = {path.name: path.read_bytes() for path in assistant.iterdir()}
    plain = generated(cli, folder, "none")
    assert generated(cli, folder, "org/a")["token_ids"] == plain["token_ids"]
