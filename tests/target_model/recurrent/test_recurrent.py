"""Targets whose layers keep a recurrent state, against mlx-lm's own models, caches and loops."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from batches import FEW, drafted, follow_a_random_schedule
from decoding import PROMPT, counted_reads, read, run, up_to
from hybrids import BY_RECURRENCE, HYBRIDS, hybrid_model
from states import distance, distances, states_in, states_of
from tiny import VOCAB, Words, byte_tokenizer, plain_tokens, random_drafter
from trees import PROMPTS, sequential_logits, tree_for

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.speculation.tree import TokenTree
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.tree_check import check_trees

GREEDY = SamplingParams()
SHAPES = (PLAIN, BeamShape(1, 4), BeamShape(3, 4), BeamShape(2, 8))


def paths_of(tree: TokenTree, row: int) -> list[list[int]]:
    """Return the nodes from the root to each node."""
    paths: list[list[int]] = []
    for i, parent in enumerate(tree.parents[row].tolist()):
        paths.append([*(paths[parent] if parent >= 0 else []), i])
    return paths


def assert_states(cache: TreeCache, row: int, want: list[np.ndarray], tolerance: float) -> None:
    assert distance(states_in(cache, row), want) <= tolerance


@pytest.mark.parametrize("name", HYBRIDS)
def test_tree_logits_equal_sequential_logits_in_a_batch_of_different_rows(name: str) -> None:
    model = hybrid_model(name)
    target, tree = Target(model), tree_for(2)
    length = mx.array([len(p) for p in PROMPTS])
    _, logits = target.verify(tree, read(target, PROMPTS), length, max(map(len, PROMPTS)))
    valid = tree.valid.tolist()
    for b, prompt in enumerate(PROMPTS):
        tokens = tree.tokens[b].tolist()
        for i, path in enumerate(paths_of(tree, b)):
            if valid[b][i]:
                want = sequential_logits(model, prompt + [tokens[j] for j in path])
                got = np.array(logits[b, i].astype(mx.float32))
                assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max(), (b, i)


@pytest.mark.parametrize("name", BY_RECURRENCE)
def test_states_after_every_commit_equal_those_of_the_text(name: str) -> None:
    """Wherever the path ends, in rows of different length, by a flush or by the next call."""
    model = hybrid_model(name)
    target, tree = Target(model), tree_for(2)
    length = mx.array([len(p) for p in PROMPTS])
    before, valid = read(target, PROMPTS), tree.valid.tolist()
    for end in range(0, tree.tokens.shape[1], 2):
        if not all(row[end] for row in valid):
            continue
        cache = before.take(mx.array([0, 1]))
        target.verify(tree, cache, length, max(map(len, PROMPTS)))
        paths = [paths_of(tree, b)[end] for b in range(2)]
        padded = mx.array([path + [0] * (4 - len(path)) for path in paths])
        after = cache.commit(tree, padded, mx.array([len(p) - 1 for p in paths]), length)
        if end % 4:
            cache.flush()
        else:
            target.verify(tree, cache, after, max(map(len, PROMPTS)) + 4)
        for b, prompt in enumerate(PROMPTS):
            text = prompt + [tree.tokens[b, i].item() for i in paths[b]]
            assert_states(cache, b, states_of(model, text), 1e-4)


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_check_at_loading_passes(name: str) -> None:
    assert check_trees(Target(hybrid_model(name))) < 1e-4


@pytest.mark.parametrize("name", BY_RECURRENCE)
def test_tokens_equal_autoregression(name: str) -> None:
    model = hybrid_model(name)
    text, target = PROMPT + plain_tokens(model, PROMPT, 60), Target(model)
    for shape in SHAPES:
        emitted, results = run(Decoder(target, Oracle(text, VOCAB), shape, GREEDY), PROMPT, 50)
        assert emitted == text[3:53], shape
        assert max(len(r.tokens) for r in results) == shape.length


@pytest.mark.parametrize("name", BY_RECURRENCE)
def test_a_step_reads_nothing_on_the_host(name: str) -> None:
    """Where the accepted path ends, which states are committed at, is known on the device alone."""
    target = Target(hybrid_model(name))
    decoder = Decoder(target, random_drafter().bind(target), BeamShape(3, 4), GREEDY)
    state, _ = decoder.start(decoder.new_cache(), 0, [PROMPT], sequence_keys(0))
    with counted_reads() as counts:
        for i in range(3):
            state, _ = decoder.step(state, 3 + 4 * i)
    assert counts == {}


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("params", [SamplingParams(0.9), SamplingParams(1.0, top_k=9)])
def test_sampled_text_depends_on_the_seed_alone(name: str, params: SamplingParams) -> None:
    target = Target(hybrid_model(name))
    for seed in (1, 2):
        want, _ = run(Decoder(target, None, PLAIN, params), PROMPT, 40, seed)
        text = PROMPT + want
        for shape in SHAPES[1:]:
            decoder = Decoder(target, Oracle(text, VOCAB), shape, params)
            emitted, results = run(decoder, PROMPT, 40, seed)
            assert emitted == want
            assert len(results) < 35


def assert_no_drift(name: str, lengths: tuple[int, ...], shapes: tuple[BeamShape, ...]) -> None:
    """Compare tokens, and states after some of them, with mlx-lm's own loop.

    A state may be as far from the loop's as twice mlx-lm's own distance between a text that is
    read as a prompt and token by token: at some positions experts or gates amplify the rounding.
    """
    for shape in shapes:
        for found in distances(name, lengths, shape):
            assert found.drafted <= max(1e-5, 2 * found.as_prompt), found


def test_states_after_drafted_decoding_equal_those_of_mlx_lms_loop() -> None:
    assert_no_drift("qwen3_5", (60, 180), SHAPES[2:3])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", HYBRIDS)
def test_states_do_not_drift_over_long_texts(name: str) -> None:
    """The same bound after 250 and 2,000 tokens: rounding that does not grow."""
    assert_no_drift(name, (250, 1000, 2000), SHAPES[1:])


@pytest.mark.parametrize("shape", [PLAIN, BeamShape(1, 4), BeamShape(3, 4)])
def test_random_schedules_give_every_row_its_own_tokens(shape: BeamShape) -> None:
    target = Target(hybrid_model("qwen3_5", vocab_size=FEW))
    for seed in range(4):
        host = (Lookup(1),) if seed % 2 else ()
        decoder = replace(drafted(target, shape), host_drafters=host)
        follow_a_random_schedule(decoder, seed)


def test_random_schedules_with_a_recurrent_draft_model_give_every_row_its_own_tokens() -> None:
    target, words = Target(hybrid_model("qwen3_5", vocab_size=FEW)), Words(FEW)
    small = DraftModel(hybrid_model("falcon_h1", vocab_size=FEW), words)  # type: ignore[arg-type]
    for seed in range(2):
        decoder = Decoder(target, small.bind(target, words), BeamShape(2, 3), GREEDY)  # type: ignore[arg-type]
        follow_a_random_schedule(decoder, seed)


@pytest.mark.parametrize(
    "name",
    ["qwen3_5", "kimi_linear", "falcon_h1", "mamba2", "lfm2", "mamba", "rwkv7", "baichuan_m1"],
)
def test_answers_of_an_engine_equal_autoregression_alone_in_batches_and_cancelled(
    name: str,
) -> None:
    model, tokenizer = hybrid_model(name, vocab_size=258), byte_tokenizer()
    redrafter = Redrafter(model, tokenizer, random_drafter(vocab_size=258))
    prompts = [[3, 5, 7, 11], [9] * 30, [1, 2, 3]]
    end = tokenizer.eos_token_id
    want = [up_to(end, plain_tokens(model, prompt, 24)) for prompt in prompts]
    shape = {"beam_width": 2, "beam_length": 4}
    first = redrafter.stream(prompts[0], max_tokens=24, **shape)
    assert [next(first).token for _ in range(5)] == want[0][:5]
    first.close()
    answers: list[list[int]] = [[], [], []]
    for i, response in redrafter.batch(prompts, max_tokens=24, **shape):
        answers[i].append(response.token)
    assert answers == want
    longer = prompts[0] + want[0][:8]
    for _ in range(2):
        answer = [r.token for r in redrafter.stream(longer, max_tokens=16, **shape)]
        assert answer == want[0][8:]
