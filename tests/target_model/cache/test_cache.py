"""The cache after a step holds exactly the accepted path."""

from __future__ import annotations

import gc
import itertools
import weakref

import mlx.core as mx
import numpy as np
import pytest
from tiny import random_model
from trees import prefilled_slots, slots, tree_for

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step import Decoder, Prefill
from redrafter_mlx.speculation.accept import accept
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.cache.plans import TreePlan
from redrafter_mlx.target_model.cache.slots import (
    CAPACITY_STEP,
    attention_mask,
    grown,
    planned_capacity,
)
from redrafter_mlx.target_model.model import Target


def test_mask_lets_nodes_see_the_committed_text_and_their_ancestors() -> None:
    """The drawing in `attention_mask`."""
    tree = mx.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]).astype(mx.bool_)
    drawing = """
        1 1 1 0 0 0
        1 1 1 1 0 0
        1 1 1 0 1 0
    """
    want = [[int(c) for c in line.split()] for line in drawing.split("\n") if line.strip()]
    assert attention_mask(tree, mx.array([2]), 6)[0, 0].astype(mx.int32).tolist() == want


@pytest.mark.parametrize("batch", [1, 2])
def test_cache_after_commit_equals_prefill(batch: int) -> None:
    """For every node at which acceptance may end, in batch rows of different length and shape."""
    target = Target(random_model("qwen3"))
    prompts = [[11, 12, 13, 14, 15], [21, 22, 23]][:batch]
    tree = tree_for(batch)
    valid = tree.valid.tolist()
    for end in range(tree.tokens.shape[1]):
        if not all(v[end] for v in valid):
            continue
        cache = target.new_cache()
        width = max(map(len, prompts))
        padded = mx.array([p + [0] * (width - len(p)) for p in prompts])
        target.append(padded, cache, 0)
        length = mx.array([len(p) for p in prompts])
        target.verify(tree, cache, length, width)
        paths = []
        choices = np.full(tree.tokens.shape, 96)
        for b in range(batch):
            path, at = [], end
            while at >= 0:
                path.insert(0, at)
                at = tree.parents[b, at].item()
            for here, then in itertools.pairwise(path):
                choices[b, here] = tree.tokens[b, then].item()
            paths.append(path)
        accepted = accept(tree, mx.array(choices))
        after = cache.commit(tree, accepted.path, accepted.n_accepted, length)
        assert after.tolist() == [len(p) + len(q) for p, q in zip(prompts, paths, strict=True)]

        # The next step's write moves the path to its slots.
        following = tree_for(batch)
        target.verify(following, cache, after, width + 4)
        written = [slots(cache, b, after[b].item()) for b in range(batch)]
        for b in range(batch):
            text = prompts[b] + [tree.tokens[b, i].item() for i in paths[b]]
            for got, want in zip(written[b], prefilled_slots(target, text), strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_cache_after_flush_equals_prefill() -> None:
    target = Target(random_model())
    tree = tree_for(1)
    cache = target.new_cache()
    prompt = [11, 12, 13]
    target.append(mx.array([prompt]), cache, 0)
    target.verify(tree, cache, mx.array([3]), 3)
    choices = mx.where(tree.depths == 0, 10, 96)  # to token 10, the last child
    accepted = accept(tree, choices)
    assert accepted.n_accepted.item() == 1
    cache.commit(tree, accepted.path, accepted.n_accepted, mx.array([3]))
    cache.flush()
    for got, want in zip(
        slots(cache, 0, 5), prefilled_slots(target, [*prompt, 4, 10]), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_prefill_in_chunks_equals_prefill_at_once(chunk: int) -> None:
    target = Target(random_model())
    texts = [[(7 * i + row) % 97 for i in range(50)] for row in range(2)]
    decoder = Decoder(target, None, PLAIN, SamplingParams())
    prefill = Prefill(target, None, decoder.new_cache(), 0, texts)
    while prefill.left:
        prefill.read(chunk)
    for row, text in enumerate(texts):
        got = slots(prefill.cache.target, row, len(text))
        for one, want in zip(got, prefilled_slots(target, text), strict=True):
            np.testing.assert_allclose(one, want, rtol=1e-4, atol=1e-5)
        at_once = target.append(mx.array([text]), target.new_cache(), 0)[0, -1:]
        np.testing.assert_allclose(prefill.hidden[row], at_once, rtol=1e-4, atol=1e-4)


def test_buffers_grow_by_whole_buckets() -> None:
    model = random_model()
    decoder = Decoder(Target(model), None, BeamShape(1, 1), SamplingParams())
    cache = decoder.new_cache()
    seen: set[int] = set()
    count = 0

    def finished(_: object) -> bool:
        nonlocal count
        count += 1
        seen.add(cache.target.layers[0].keys.shape[2])  # type: ignore[union-attr]
        return count > CAPACITY_STEP + 60

    for _ in decode(decoder, cache, 0, [1, 2, 3], sequence_keys(0), finished):
        pass
    assert seen == {CAPACITY_STEP, 2 * CAPACITY_STEP}


@pytest.mark.parametrize("length", [1, 250, 1000, 33_000])
def test_the_planned_capacity_is_that_of_the_call(length: int) -> None:
    """The mask fits into it."""
    tree, cache = tree_for(1), TreeCache(2)
    cache.plan_tree(tree, mx.array([length]), length)
    assert isinstance(cache.plan, TreePlan)
    N = tree.tokens.shape[1]
    assert cache.plan.capacity == planned_capacity(length, N)
    assert cache.plan.capacity >= cache.plan.extent >= length + N
    assert planned_capacity(33_000, 32) == 36_864


def test_buffers_that_grow_are_in_memory_once_at_each_size() -> None:
    small = mx.ones((1, 2, 32, 64))
    mx.eval(small)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    large = grown(small, 4096)
    mx.eval(large)
    assert mx.get_peak_memory() - before <= large.nbytes + 4096
    assert mx.array_equal(large[:, :, :32], small)
    assert mx.array_equal(large[:, :, 32:], mx.zeros((1, 2, 4096 - 32, 64)))


def test_a_cache_that_is_let_go_is_freed_at_once() -> None:
    target = Target(random_model())
    cache = target.new_cache()
    target.append(mx.array([[1, 2, 3]]), cache, 0)
    layer = weakref.ref(cache.layers[0])
    gc.disable()
    try:
        del cache
        assert layer() is None
    finally:
        gc.enable()
