"""Compiled graphs, against graphs that are built module by module."""

from __future__ import annotations

import gc
import itertools
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from policies import Alternating
from tiny import byte_model, byte_tokenizer, random_drafter, random_model

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.interface import Seen
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.speculation.beam_search import beam_search
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.speculation.tree import TokenTree, pack_beam
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.profile import random_tree

PROMPT = [11, 12, 13, 14, 15, 12, 13]


def tree() -> TokenTree:
    tokens = [[[4, 5, 6], [4, 7, 6], [4, 5, 8]]]
    return pack_beam(Beams(mx.array(tokens), -mx.broadcast_to(mx.arange(3.0), (1, 3, 3))), 6)


def after_prompt(target: Target) -> tuple[TreeCache, mx.array]:
    cache = target.new_cache()
    context = target.append(mx.array([PROMPT]), cache, 0)[:, -1:]
    return cache, context


def logits_of(target: Target) -> np.ndarray:
    """Return the compiled call's logits; always of the same tree after the same prompt."""
    cache, _ = after_prompt(target)
    return np.array(target.verify(tree(), cache, mx.array([len(PROMPT)]), len(PROMPT))[1])


def built_logits_of(target: Target) -> np.ndarray:
    """Return the same logits, built module by module."""
    cache, _ = after_prompt(target)
    cache.plan_tree(tree(), mx.array([len(PROMPT)]), len(PROMPT))
    return np.array(target.logits(target.hidden(tree().tokens, cache.layers)))


def test_compiled_calls_equal_those_built_by_module() -> None:
    target = Target(random_model())
    want = built_logits_of(target)
    for _ in range(3):
        np.testing.assert_allclose(logits_of(target), want, rtol=1e-5, atol=1e-5)


def test_a_size_that_is_not_compiled_at_once_is_when_it_comes_again() -> None:
    """The model's own code runs once more for the compiled graph, and then no longer."""
    model = random_model()
    target, layer, calls = Target(model), type(model.model), [0]
    want = built_logits_of(target)
    run = layer.__call__

    def counted(self: nn.Module, *given: object, **named: object) -> mx.array:
        calls[0] += 1
        return run(self, *given, **named)

    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "__call__", counted)
        for _ in range(9):
            cache, _ = after_prompt(target)
            calls[0] = 0
            got = target.verify(tree(), cache, mx.array([7]), 7, compiled=False)[1]
            np.testing.assert_allclose(np.array(got), want, rtol=1e-5, atol=1e-5)
            seen.append(calls[0])
    assert seen == [1, 1, 1, 1, 1, 0, 0, 0, 0]


def test_a_tree_that_is_tried_once_among_plain_steps_is_built_and_one_in_use_compiled() -> None:
    target = Target(random_model(num_hidden_layers=1))
    compiled, slow = [], []
    for rows in (2, 1, 3, 1, 5, 3, 3, 1, 3, 2):
        cache, _ = after_prompt(target)
        before = target.compiled, target.slow_calls
        target.verify(random_tree(rows, 97), cache, mx.array([7]), 7)
        compiled.append(target.compiled - before[0])
        slow.append(target.slow_calls - before[1])
    assert compiled == [1, 1, 0, 0, 0, 0, 1, 0, 0, 0]
    assert slow == [1, 1, 1, 0, 1, 1, 1, 0, 0, 0]


def test_few_sizes_that_are_not_compiled_yet_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that comes again soon is still compiled."""
    monkeypatch.setattr("redrafter_mlx.target_model.compiled.MAX_GRAPHS", 12)
    target = Target(random_model(num_hidden_layers=1))
    for rows in range(1, 31):
        for size in (rows, 40):
            cache, _ = after_prompt(target)
            target.verify(random_tree(size, 97), cache, mx.array([7]), 7, compiled=False)
        assert len(target.call.uses) <= 12
    assert target.compiled == 1


def test_a_target_never_computes_with_the_weights_of_a_deleted_one() -> None:
    """MLX keeps graphs per thread, and drops a function's only in the thread that used it last.

    Another thread still has them when the next target's function gets the same address.
    """
    with ThreadPoolExecutor(1) as elsewhere:
        for seed in range(10):
            target = Target(random_model(seed=seed))
            want = built_logits_of(target)
            got = elsewhere.submit(logits_of, target).result()
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(logits_of(target), want, rtol=1e-5, atol=1e-5)
            del target
            gc.collect()


def test_a_call_is_built_once_for_each_size() -> None:
    """The text's length and alternating shapes cause no new graphs."""
    model = random_model()
    built = []

    class Counted(nn.RMSNorm):
        def __call__(self, x: mx.array) -> mx.array:
            built.append(x.shape)
            return super().__call__(x)

    model.model.norm = Counted(model.args.hidden_size)
    target = Target(model)
    drafts = Oracle(PROMPT + [3] * 200, 97)
    steps = 0

    def finished(_: object) -> bool:
        nonlocal steps
        steps += 1
        return steps == 60

    decoder = Decoder(target, drafts, BeamShape(3, 3), SamplingParams())
    shapes = Alternating(BeamShape(1, 1), BeamShape(3, 3))
    keys = sequence_keys(0)
    for _ in decode(decoder, decoder.new_cache(), 0, PROMPT, keys, finished, policy=shapes):
        pass
    calls = [shape for shape in built if shape[1] != len(PROMPT)]
    # Two tree sizes, each after the other or itself, at no more than four extents.
    assert 2 <= len(calls) <= 16


@pytest.mark.parametrize("shape", [BeamShape(1, 2), BeamShape(1, 4), BeamShape(3, 4)])
@pytest.mark.parametrize("kind", ["drafter", "context"])
def test_compiled_drafts_equal_those_built_by_module(kind: str, shape: BeamShape) -> None:
    more: dict[str, dict[str, object]] = {"context": {"context_layers": (0, 1)}}
    drafter = random_drafter(**more.get(kind, {}))
    target = Target(random_model()).reading(drafter.config.context_layers)
    bound = drafter.bind(target)
    _, features = after_prompt(target)
    P = len(PROMPT)
    for root in (12, 14, 50):
        seen = Seen(mx.array([[0, root]]), features, mx.array([P - 1]), mx.array([1]), P)
        levels = bound.levels_of(features[:, 0], seen.root, shape.length - 1)
        want, got = beam_search(levels, seen.root, shape), bound.draft((), seen, shape)[0]
        assert got.tokens.tolist() == want.tokens.tolist()
        np.testing.assert_allclose(
            np.array(got.log_probs), np.array(want.log_probs), rtol=1e-5, atol=1e-5
        )


def test_graphs_are_bounded_over_a_long_text_of_changing_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """4,000 tokens; a dropped graph is compiled again, with the same result."""
    monkeypatch.setattr("redrafter_mlx.target_model.compiled.MAX_GRAPHS", 12)
    target = Target(random_model(num_hidden_layers=1, max_position_embeddings=8192))
    want = logits_of(target)
    cache, _ = after_prompt(target)
    length, counts = len(PROMPT), []
    for rows in itertools.cycle((1, 2, 5, 9)):
        drafted = random_tree(rows, 97)
        target.verify(drafted, cache, mx.array([length]), length)
        levels = drafted.max_depth + 1
        path, accepted = mx.arange(levels)[None], mx.array([levels - 1])
        cache.commit(drafted, path, accepted, mx.array([length]))
        mx.eval(cache.buffers)
        length += levels
        counts.append(len(target.call.graphs))
        if length > 4_000:
            break
    assert max(counts) == counts[-1] == 12
    np.testing.assert_array_equal(logits_of(target), want)


def test_while_copies_follow_each_other_each_step_is_built_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plain step that would follow a copy is built only where the copies end."""
    built, honest = [0], Decoder.step

    def step(self, *given, **named):  # type: ignore[no-untyped-def]
        built[0] += 1
        return honest(self, *given, **named)

    monkeypatch.setattr(Decoder, "step", step)
    redrafter = Redrafter(byte_model(seed=1), byte_tokenizer(), host_drafters=(Lookup(),))
    stream = redrafter.stream("hello hello", max_tokens=300, beam_width=1, beam_length=8)
    copied = [token.step.from_host for token in stream if token.index == 0 and token.steps > 0]
    begun = sum(now and not before for before, now in itertools.pairwise([False, *copied]))
    assert sum(copied) > 2 * begun > 0
    assert built[0] == len(copied) + begun
