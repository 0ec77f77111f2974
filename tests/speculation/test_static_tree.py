"""Static trees: the tokens on a fixed list of rank paths, from any drafter, without scores."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from beams import log_probs_along
from decoding import counted, run
from tiny import (
    HIDDEN,
    VOCAB,
    Words,
    byte_model,
    byte_tokenizer,
    plain_tokens,
    random_drafter,
    random_model,
    tiny_source,
)

from redrafter_mlx.config import AcceptMethod, BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.drafting.names import parse
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.drafting.recurrent import save_drafter
from redrafter_mlx.drafting.static_trees import find_tree
from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.loading.drafter import prepare_drafter
from redrafter_mlx.loading.load import draft_with
from redrafter_mlx.loading.target import LoadedTarget
from redrafter_mlx.speculation.static_tree import RankPath, StaticTree, static_tree
from redrafter_mlx.speculation.tree import pack_beam
from redrafter_mlx.target_model.model import Target

PROMPT = [3, 5, 7, 11, 4]
PATHS = ((0,), (1,), (2,), (0, 0), (0, 3), (2, 0), (2, 1), (0, 3, 0), (2, 1, 1), (2, 1, 2))
TREE = StaticTree(PATHS)


def draft_model(target: Target) -> Drafter:
    model = random_model(seed=7)
    return DraftModel(model, Words(VOCAB)).bind(target, Words(VOCAB))  # type: ignore[arg-type]


def recurrent(target: Target) -> Drafter:
    return random_drafter().bind(target)


def test_each_path_bears_the_token_of_its_rank_after_the_path_before() -> None:
    bound = random_drafter(draft_vocab_size=20).bind(Target(random_model()))
    mx.random.seed(3)
    context, roots = mx.random.normal((2, HIDDEN)), [3, 50]
    beams = static_tree(bound.levels_of(context, mx.array(roots), 3), mx.array(roots), TREE)
    tree = pack_beam(beams, TREE.shape.nodes)
    for b, root in enumerate(roots):
        tokens: dict[RankPath, tuple[int, ...]] = {(): (root,)}
        scores = {(root,): 0.0}
        for path in sorted(PATHS, key=len):
            before = tokens[path[:-1]]
            row = np.array(log_probs_along(bound, context[b], before))
            token = int(np.argsort(-row, kind="stable")[path[-1]])
            tokens[path] = (*before, token)
            scores[tokens[path]] = scores[before] + float(row[token])
        packed: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens[b].tolist(), tree.parents[b].tolist(), strict=True):
            packed.append((*packed[parent], token) if packed else (token,))
        assert sorted(packed) == sorted(tokens.values())
        for depth in range(1, 4):
            for i, path in enumerate(TREE.level(depth)):
                assert beams.tokens[b, i, depth].item() == tokens[path][-1]
                got = beams.log_probs[b, i, depth].item()
                assert got == pytest.approx(scores[tokens[path]], abs=1e-4)


@pytest.mark.parametrize("make", [recurrent, draft_model])
def test_tokens_equal_autoregression_and_the_whole_tree_is_verified(make: object) -> None:
    model = random_model(vocab_size=VOCAB)
    target = Target(model)
    drafter = make(target).along(TREE)  # type: ignore[operator]
    assert drafter.tree is TREE
    assert TREE.shape == BeamShape(4, 4, 11)
    decoder = Decoder(target, drafter, TREE.shape, SamplingParams())
    emitted, results = run(decoder, PROMPT, 50)
    assert emitted == plain_tokens(model, PROMPT, 50)
    assert {r.shape for r in results[1:]} == {TREE.shape}
    assert {r.nodes for r in results[1:]} == {r.query_rows for r in results[1:]} == {len(PATHS) + 1}


def test_the_target_itself_is_accepted_along_the_first_path() -> None:
    """A step calls the draft model once per depth, on the nodes that have children."""
    model = random_model()
    target = Target(model)
    drafter = DraftModel(model, Words(VOCAB)).bind(target, Words(VOCAB))  # type: ignore[arg-type]
    tree = StaticTree(((0,), (0, 0), (0, 0, 0), (1,), (1, 0)))
    decoder = Decoder(target, drafter.along(tree), tree.shape, SamplingParams())
    with counted(drafter.model, "call") as rows:
        _, results = run(decoder, PROMPT, 40)
    assert {len(r.tokens) for r in results[1:]} == {4}
    assert rows[-3:] == [5, 2, 1]  # the accepted path and the root; (0,) and (1,); (0, 0)


@pytest.mark.parametrize("accept", ["sample", "rejection"])
def test_sampled_text_is_that_of_plain_decoding(accept: AcceptMethod) -> None:
    """By rejection, too: ranks are not sampled, so the target samples at the nodes."""
    target = Target(random_model())
    with_tree = Decoder(
        target, recurrent(target).along(TREE), TREE.shape, SamplingParams(0.9, accept=accept)
    )
    plain = Decoder(target, None, BeamShape(1, 1), SamplingParams(0.9))
    assert run(with_tree, PROMPT, 40)[0] == run(plain, PROMPT, 40)[0]


@pytest.mark.parametrize(
    ("paths", "named"),
    [
        ((), "paths"),
        (((0,), (0,)), "once"),
        (((0,), ()), "depth"),
        (((0,), (1, 0)), r"\[1, 0\] needs \[1\]"),
        (((0,), (-1,)), "-1"),
        (((0,), (70,)), "70"),
        ((tuple([0] * 40),), "40"),
    ],
)
def test_a_list_that_is_no_tree_is_refused(paths: tuple[RankPath, ...], named: str) -> None:
    with pytest.raises(BadInputError, match=named):
        StaticTree(paths)


def test_another_shape_than_the_trees_is_refused() -> None:
    target = Target(random_model())
    decoder = Decoder(target, recurrent(target).along(TREE), BeamShape(2, 3), SamplingParams())
    with pytest.raises(BadInputError, match="10 drafts, 3 deep"):
        run(decoder, PROMPT, 5)


def test_a_drafter_without_levels_has_no_static_tree() -> None:
    with pytest.raises(BadInputError, match="cannot draft along"):
        Oracle(PROMPT, VOCAB).along(TREE)


def test_more_ranks_than_a_draft_vocabulary_has_are_refused() -> None:
    drafter = random_drafter(draft_vocab_size=3).bind(Target(random_model()))
    with pytest.raises(BadInputError, match="only 3 tokens"):
        drafter.along(TREE)


@pytest.mark.parametrize(
    ("name", "drafts", "depth"),
    [
        ("medusa_mc_sim_7b_63", 63, 4),
        ("medusa_vicuna_33b_stage1", 63, 3),
        ("medusa_zephyr_stage2", 63, 4),
        ("eagle_mc_sim_7b_63", 25, 5),
    ],
)
def test_published_trees_have_their_authors_sizes(name: str, drafts: int, depth: int) -> None:
    tree = find_tree(name)
    assert (len(tree.paths), tree.depth, tree.max_ranks <= 10) == (drafts, depth, True)
    assert tree.shape.nodes == drafts + 1


def test_a_tree_is_named_beside_the_drafter(tmp_path: Path) -> None:
    """A published tree, and one in a file; no other shape may be requested."""
    save_drafter(random_drafter(vocab_size=258), tmp_path / "drafter")
    model = byte_model()
    source = tiny_source()
    loaded = LoadedTarget.of(model, byte_tokenizer(), source)
    (tmp_path / "tree.json").write_text(json.dumps([list(path) for path in PATHS]))
    plain = plain_tokens(model, PROMPT, 20)
    for word, shape in (
        ("eagle_mc_sim_7b_63", BeamShape(8, 6, 26)),
        (f"{tmp_path / 'tree.json'}+lookup", TREE.shape),
    ):
        named = prepare_drafter(parse(f"{tmp_path / 'drafter'}+tree:{word}"))
        redrafter = draft_with(named, loaded)
        assert redrafter.tuning is None, "no shape is left to choose"
        assert redrafter.drafting is not None
        assert f"along the static tree {word.removesuffix('+lookup')}" in redrafter.drafting
        assert redrafter.drafting.endswith("and lookup") == word.endswith("+lookup")
        answer = redrafter.generate(PROMPT, max_tokens=20)
        assert answer.token_ids == plain
        assert set(answer.shapes) == {shape}
        same = redrafter.generate(PROMPT, max_tokens=20, beam_width=shape.width)
        assert same.token_ids == plain
        assert redrafter.generate(PROMPT, max_tokens=20, draft=False).token_ids == plain
        for other in ({"beam_width": 3}, {"beam_length": 3}, {"max_nodes": 5}):
            with pytest.raises(BadInputError, match=f"{next(iter(other))} is"):
                redrafter.generate(PROMPT, **other)


def test_a_trees_file_may_be_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tree.json").write_text(json.dumps(PATHS))
    tree = prepare_drafter(parse("trained+tree:~/tree.json")).tree
    assert tree is not None
    assert tree.paths == PATHS


def test_a_tree_that_is_not_there_is_refused_before_a_target_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"no tree 'oak'.*medusa_mc_sim_7b_63"):
        prepare_drafter(parse("trained+tree:oak"))
    for drafter in ("lookup", "auto"):
        with pytest.raises(BadInputError, match=f"{drafter} drafts along no tree"):
            prepare_drafter(parse(f"{drafter}+tree:medusa_mc_sim_7b_63"))
    nested = "[" * 100_000
    for content, named in (
        ("{", "cannot be read"), (nested, "cannot be read"), ("[1]", "no list of lists"),
    ):  # fmt: skip
        (tmp_path / "tree.json").write_text(content)
        with pytest.raises(DamagedFileError, match=named):
            prepare_drafter(parse(f"trained+tree:{tmp_path / 'tree.json'}"))
    (tmp_path / "tree.json").write_text('[["a"]]')
    with pytest.raises(BadInputError, match="rank of a static tree is 'a'"):
        prepare_drafter(parse(f"trained+tree:{tmp_path / 'tree.json'}"))
