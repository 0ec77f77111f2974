"""Constraints: the text is the constrained target's own, with and without drafts."""

from __future__ import annotations

import math
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from backends import frees_at_once
from constraints import Rules, phrases
from decoding import counted_reads, run
from distributions import chi_square, critical, sampled_probs
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors
from tiny import byte_model, byte_tokenizer, random_drafter, random_model

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.constraint import Constraint, allowed_tokens, constrained
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.response import StepResult
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.speculation.tree import pack_beam
from redrafter_mlx.target_model.model import Target

VOCAB = 97
PROMPT = [3, 5, 7]


@cache
def model_of(vocab_size: int = VOCAB) -> nn.Module:
    return random_model(vocab_size=vocab_size, seed=3)


def plain(
    model: nn.Module, prompt: list[int], n: int, rules: Rules, penalty: float = 1.0
) -> list[int]:
    """Return the tokens of mlx-lm's greedy loop with the rules as a logits processor."""
    processors = make_logits_processors(repetition_penalty=None if penalty == 1.0 else penalty)

    def masked(tokens: mx.array, logits: mx.array) -> mx.array:
        emitted = tuple(tokens.tolist()[len(prompt) :])  # type: ignore[arg-type]
        allowed = rules._rule(emitted)
        keep = mx.array([t in allowed for t in range(logits.shape[-1])])
        return mx.where(keep, logits, -mx.inf)

    steps = generate_step(
        mx.array(prompt), model, max_tokens=n, logits_processors=[*processors, masked]
    )
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 4), (4, 3)])
@pytest.mark.parametrize("looks_up", [False, True])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_tokens_equal_mlx_lms_with_the_same_mask(
    shape: tuple[int, int], looks_up: bool, penalty: float
) -> None:
    """The drafter is an oracle that errs now and then, so that all lengths are accepted."""
    model, rule = model_of(), phrases(VOCAB)
    want = plain(model, PROMPT, 60, Rules(rule, VOCAB), penalty)
    decoder = Decoder(
        Target(model),
        Oracle(PROMPT + want, VOCAB),
        BeamShape(*shape),
        SamplingParams(repetition_penalty=penalty),
        host_drafters=(Lookup(),) if looks_up else (),
    )
    emitted, results = run(decoder, PROMPT, 60, rules=Rules(rule, VOCAB))
    assert emitted == want
    assert {len(r.tokens) for r in results} <= set(range(1, shape[1] + 1))
    assert max(len(r.tokens) for r in results) == shape[1]


@pytest.mark.parametrize("shape", [(1, 4), (3, 3)])
def test_a_seed_gives_the_same_text_with_drafts_and_without(shape: tuple[int, int]) -> None:
    model, rule = model_of(), phrases(VOCAB)
    target, params = Target(model), SamplingParams(temperature=1.5, top_p=0.9)
    drafter = random_drafter().bind(target)
    texts = []
    for drafts, beams in ((None, BeamShape(1, 1)), (drafter, BeamShape(*shape))):
        decoder = Decoder(target, drafts, beams, params, host_drafters=(Lookup(),))
        texts.append(
            [run(decoder, PROMPT, 40, seed, rules=Rules(rule, VOCAB))[0] for seed in range(3)]
        )
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts[0]}) == 3


def test_forced_tokens_are_drafts_that_hold() -> None:
    """A run of four forced tokens takes one step, although only the grammar drafts."""
    model = model_of()

    def rule(text: tuple[int, ...]) -> set[int]:
        return {7 * len(text) % VOCAB} if len(text) % 5 else set(range(VOCAB))

    decoder = Decoder(Target(model), None, BeamShape(1, 5), SamplingParams())
    emitted, results = run(decoder, PROMPT, 50, rules=Rules(rule, VOCAB))
    assert emitted == plain(model, PROMPT, 50, Rules(rule, VOCAB))
    assert [len(r.tokens) for r in results[1:]] == [5] * 10


def test_a_step_reads_the_tree_and_what_was_accepted_and_nothing_else() -> None:
    model = model_of()
    target = Target(model)
    decoder = Decoder(target, random_drafter().bind(target), BeamShape(2, 3), SamplingParams())
    rules = Rules(phrases(VOCAB), VOCAB)
    with counted_reads() as counts:
        _, results = run(decoder, PROMPT, 40, rules=rules)
    assert rules.masked == len(results)
    assert sum(counts.values()) == 2 * len(results)


def test_rows_without_a_constraint_are_decoded_as_if_alone() -> None:
    model, few = model_of(16), 16
    target = Target(model)
    drafter = random_drafter(vocab_size=few).bind(target)
    decoder = Decoder(target, drafter, BeamShape(3, 3), SamplingParams())
    prompts, rules = [PROMPT, [11, 13, 2], [4, 1, 8]], Rules(phrases(few), few)
    constraints: list[Constraint | None] = [None, rules, None]
    cache = decoder.new_cache(3)
    state, output = decoder.start(cache, 0, prompts, sequence_keys(0, 3), constraints=constraints)
    emitted: list[list[int]] = [[], [], []]
    for _ in range(15):
        for row, result in zip(emitted, output.read(), strict=True):
            row.extend(result.tokens)
            if row is emitted[1]:
                for token in result.tokens:
                    rules.advance(token)
        bound = int(max(state.length.tolist()))  # type: ignore[arg-type]
        state, output = decoder.step(state, bound, constraints=constraints)
    for prompt, row in zip(prompts, emitted, strict=True):
        free = Rules(lambda _: set(range(few)), few)
        of_row = Rules(phrases(few), few) if row is emitted[1] else free
        assert row == plain(model, prompt, len(row), of_row)


def test_masks_are_of_each_nodes_own_path() -> None:
    """Root, 1, 1-2, 3, 3-2: the tokens allowed after 2 depend on its parent."""
    beams = Beams(
        mx.array([[[0, 1, 2], [0, 3, 2]]], mx.int32), mx.array([[[0, -1, -2], [0, -1.5, -3]]])
    )
    tree = pack_beam(beams, 5)

    def rule(text: tuple[int, ...]) -> set[int]:
        return {(): {1, 3}, (1,): {2, 4}, (3,): {2, 5}, (1, 2): {33}, (3, 2): {0, 34}}[text]

    masks = allowed_tokens([Rules(rule, 35)], tree, 35)
    kept = np.isfinite(np.array(constrained(mx.zeros((1, 5, 35)), masks)))[0]
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    paths = [()]
    for token, parent in list(zip(tokens, parents, strict=True))[1:5]:  # type: ignore[arg-type]
        paths.append((*paths[parent], token))
    assert sorted(paths) == [(), (1,), (1, 2), (3,), (3, 2)]
    for node, path in enumerate(paths):
        assert set(np.flatnonzero(kept[node])) == rule(path)


@pytest.mark.parametrize("accept", ["sample", "rejection"])
def test_lossless_methods_keep_the_constrained_targets_joint_distribution(accept: str) -> None:
    few, n, rows = 5, 3, 1500
    model = random_model(vocab_size=few, num_hidden_layers=1)
    target, prompt = Target(model), [1, 4]

    def rule(text: tuple[int, ...]) -> set[int]:
        return {0, 2, 3} if sum(text) % 2 else {1, 2, 4} if text else {0, 1, 2, 3}

    params = SamplingParams(1.0, top_p=0.95, accept=accept)  # type: ignore[arg-type]
    drafter = random_drafter(vocab_size=few).bind(target)
    decoder = Decoder(target, drafter, BeamShape(2, 3), params)
    constraints = [Rules(rule, few) for _ in range(rows)]
    keys = sequence_keys(7, rows)
    cache = decoder.new_cache(rows)
    state, output = decoder.start(cache, 0, [prompt] * rows, keys, constraints=constraints)
    while True:
        for constraint, result in zip(constraints, output.read(), strict=True):
            for token in result.tokens:
                constraint.advance(token)
        lengths = [len(constraint.text) for constraint in constraints]
        if min(lengths) >= n:
            break
        bound = len(prompt) + max(lengths)
        state, output = decoder.step(state, bound, constraints=constraints)
    counts, expected = np.zeros((few,) * n), np.zeros((few,) * n)
    for constraint in constraints:
        counts[constraint.text[:n]] += 1
    for path in np.ndindex(*expected.shape):
        logits = np.array(model(mx.array([[*prompt, *path]])))[0, len(prompt) - 1 : -1]
        for i in range(n):
            banned = [t for t in range(few) if t not in rule(path[:i])]
            logits[i, banned] = -math.inf
        probs = sampled_probs(logits, params)
        expected[path] = rows * math.prod(float(probs[i, t]) for i, t in enumerate(path))
    assert counts[expected == 0].sum() == 0
    statistic, freedom = chi_square(counts.ravel(), expected.ravel())
    assert statistic < critical(freedom)


def test_an_answer_ends_with_its_constraint() -> None:
    model = Redrafter(byte_model(seed=1), byte_tokenizer(), random_drafter(vocab_size=258))
    texts = []
    for draft in (True, False):
        rules = Rules(lambda _: set(range(97, 123)), 258, length=7)
        answer = model.generate(PROMPT, constraint=rules, draft=draft)
        assert answer.finish_reason == "stop"
        assert all(97 <= token < 123 for token in answer.token_ids)
        texts.append(answer.token_ids)
    assert texts[0] == texts[1]
    assert len(texts[0]) == 7


def test_a_constraint_that_allows_nothing_ends_the_answer_with_an_error() -> None:
    model = Redrafter(byte_model(seed=1), byte_tokenizer(), host_drafters=(Lookup(),))

    def rule(text: tuple[int, ...]) -> set[int]:
        return set(range(97, 123)) if len(text) < 5 else set()

    for draft in (True, False):
        with pytest.raises(BadInputError, match="no token may follow"):
            model.generate(PROMPT, draft=draft, constraint=Rules(rule, 258))
    assert len(model.generate(PROMPT, max_tokens=9).token_ids) == 9


def test_acceptance_statistics_learn_from_unconstrained_answers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers with penalties or biases do not count either: they change the target, too."""
    # With this machine's measured step times, drafts might not pay.
    learn = "redrafter_mlx.tuning.corrections.BatchCorrections.learn"
    monkeypatch.setattr(learn, lambda *_: False)
    model = Redrafter(byte_model(seed=1), byte_tokenizer(), random_drafter(vocab_size=258))
    assert model.tuning is not None
    model.try_drafter()
    first = model.tuning.policy("greedy").acceptance.chances()[0, 0]
    altered: list[dict[str, object]] = [
        {"constraint": Rules(lambda _: set(range(97, 123)), 258)},
        {"repetition_penalty": 1.2},
        {"logit_bias": {5: 2.0}},
    ]
    for options in altered:
        model.generate(PROMPT, max_tokens=30, **options)  # type: ignore[arg-type]
        assert model.tuning.policy("greedy").acceptance.chances()[0, 0] == first
    model.generate(PROMPT, max_tokens=200)
    model.close()  # it is recorded after the answer's end
    assert model.tuning.policy("greedy").acceptance.chances()[0, 0] != first


@frees_at_once
@pytest.mark.parametrize("shape", [BeamShape(1, 1), BeamShape(2, 3)])
def test_buffers_are_written_in_place_though_verification_is_submitted_alone(
    shape: BeamShape,
) -> None:
    """The KV cache is in memory only once while decoding; a copied buffer would be there twice."""
    model = random_model(num_attention_heads=2, num_key_value_heads=2, head_dim=64)
    target = Target(model)
    decoder = Decoder(target, random_drafter().bind(target), shape, SamplingParams())
    cache, rules = decoder.new_cache(), Rules(phrases(VOCAB), VOCAB)
    mx.clear_cache()
    before = mx.get_active_memory()

    def finished(result: StepResult) -> bool:
        for token in result.tokens:
            rules.advance(token)
        if rules.masked == 3:  # after the prompt
            mx.reset_peak_memory()
        return rules.masked == 12

    prompt = [i % VOCAB for i in range(3_000)]
    for _ in decode(decoder, cache, 0, prompt, sequence_keys(0), finished, constraint=rules):
        pass
    assert mx.get_peak_memory() - before < 1.4 * cache.target.nbytes
