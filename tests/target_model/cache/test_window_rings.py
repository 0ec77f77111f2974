"""Layers with a sliding window keep their window alone, in a ring of slots, against mlx-lm's."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from batches import Decoded, decode_together
from decoding import peak_of_decoding, run, up_to
from ended import ended
from primitives import launched
from tiny import SLIDING, VOCAB, WINDOW, byte_tokenizer, plain_tokens, sliding_model

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.cache.checkpoints import CHANGED_END, stops
from redrafter_mlx.decoding.cache.prefix_cache import PrefixCache
from redrafter_mlx.decoding.cache.sequence_cache import SequenceCache
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.memory import MemoryBudget
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.speculation.tree import pack_beam
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.cache.layer_cache import LayerCache
from redrafter_mlx.target_model.cache.plans import RING_SLACK, ring_size
from redrafter_mlx.target_model.cache.slots import ring_mask
from redrafter_mlx.target_model.model import Target

GREEDY = SamplingParams()
RING = WINDOW + 64
LONG = 2 * RING + 20
TREES = [PLAIN, BeamShape(1, 4), BeamShape(3, 4), BeamShape(30, 4)]
assert TREES[-1].nodes > RING_SLACK


def text(n: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(n)]


def read(target: Target, tokens: list[int], chunk: int = 50) -> TreeCache:
    """Return the cache of a text, read in chunks."""
    cache = target.new_cache()
    for at in range(0, len(tokens), chunk):
        target.append(mx.array([tokens[at : at + chunk]]), cache, at, len(tokens))
    return cache


def windows_of(cache: TreeCache) -> list[LayerCache]:
    return [layer for layer in cache.attention if layer.window is not None]


def test_a_ring_lets_nodes_see_the_newest_positions_of_their_path() -> None:
    """The drawing in `ring_mask`."""
    tree = mx.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]).astype(mx.bool_)
    given = tree, mx.array([[0, 1, 1]]), mx.array([7]), 3, 8, 8
    drawing = [[0, 0, 0, 0, 0, 1, 1, 1], [1, 0, 0, 0, 0, 0, 1, 1], [0, 1, 0, 0, 0, 0, 1, 1]]
    assert ring_mask(*given, apart=False)[0, 0].astype(mx.int32).tolist() == drawing
    apart = ring_mask(*given, apart=True)[0, 0].astype(mx.int32)
    committed = [[0, 0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1, 0]]
    assert apart[:, :8].tolist() == committed
    assert apart[:, 8:].tolist() == tree[0].astype(mx.int32).tolist()


@pytest.mark.parametrize("name", SLIDING)
def test_tokens_equal_autoregression_long_after_the_window(name: str) -> None:
    """By trees of every kind, from prompts before and after the end of the ring's first turn."""
    model = sliding_model(name)
    target = Target(model)
    for n, shape in zip((RING - 3, WINDOW - 2, 40, 2 * RING - 20), TREES, strict=True):
        prompt = text(n, seed=n)
        whole = prompt + plain_tokens(model, prompt, LONG - n)
        decoder = Decoder(target, Oracle(whole, VOCAB), shape, GREEDY)
        emitted, results = run(decoder, prompt, LONG - n)
        assert emitted == whole[n:]
        assert max(len(r.tokens) for r in results) == shape.length


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_whose_rings_end_at_different_times_are_decoded_as_if_alone(
    temperature: float,
) -> None:
    model = sliding_model("gemma3_text")
    params = SamplingParams(temperature)
    decoder = Decoder(Target(model), None, BeamShape(2, 4), params, host_drafters=(Lookup(1),))
    rows = [Decoded(text(n, seed=n), 40, n, params) for n in (5, RING - 20, 2 * RING)]
    decode_together(decoder, rows)
    plain = Decoder(Target(model), None, PLAIN, params)
    for row in rows:
        assert row.emitted[:40] == row.alone(plain).emitted[:40]
        if not temperature:
            assert row.emitted[:40] == plain_tokens(model, row.prompt, 40)


def test_a_window_keeps_no_more_than_its_ring() -> None:
    target = Target(sliding_model("gemma3_text"))
    tokens = text(LONG)
    decoder = Decoder(target, None, BeamShape(1, 4), GREEDY, host_drafters=(Lookup(1),))
    cache = decoder.new_cache()
    run(decoder, tokens, 20, cache=cache)
    (window,) = windows_of(cache.target)
    assert window.capacity == RING
    assert window.keys.nbytes == window.slot_bytes // 2 * RING  # type: ignore[union-attr]
    texts, cache = PrefixCache(10**9), decoder.new_cache()
    cache.target = read(target, tokens)
    (whole,) = [layer for layer in cache.target.attention if layer.window is None]
    texts.keep(cache, tokens, None)
    assert texts.nbytes <= whole.slot_bytes * (LONG + 32) + window.slot_bytes * RING


@pytest.mark.parametrize("shape", [PLAIN, BeamShape(3, 4)])
def test_a_step_reads_no_more_keys_than_the_ring_has(
    shape: BeamShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, tokens = Target(sliding_model("gpt_oss")), text(LONG)
    decoder = Decoder(target, Oracle(tokens, VOCAB), shape, GREEDY)
    fetch, read_keys = LayerCache.update_and_fetch, list[int]()

    def recorded(layer: LayerCache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        found = fetch(layer, keys, values)
        if layer.window is not None and keys.shape[2] <= shape.nodes:
            read_keys.append(found[0].shape[2])
        return found

    monkeypatch.setattr(LayerCache, "update_and_fetch", recorded)
    run(decoder, tokens[:-20], 20)
    assert {*read_keys} == {RING}


def layer_launches(shape: BeamShape) -> Counter[str]:
    """Return what one more layer with a window adds to a step long after the window."""
    counts = []
    for layers in (2, 3):
        model = sliding_model(
            "gemma3_text", num_hidden_layers=layers, sliding_window_pattern=layers
        )
        target = Target(model)
        cache, tree = read(target, text(LONG)), pack_beam(beams(shape), shape.nodes)
        length, path = mx.array([LONG]), mx.zeros((1, shape.length), mx.int32)
        for bound in (LONG, LONG + 1):
            mx.eval(cache.buffers, length)
            hidden, _ = target.verify(tree, cache, length, bound)
            length = cache.commit(tree, path, mx.array([0]), length)
        counts.append(launched([hidden, *cache.buffers]))
    return counts[1] - counts[0]


def beams(shape: BeamShape) -> Beams:
    W, L = shape.width, shape.length
    tokens = mx.where(mx.arange(L) == 0, 0, mx.arange(W * L, dtype=mx.int32).reshape(1, W, L))
    return Beams(tokens, mx.broadcast_to(-mx.arange(L, dtype=mx.float32), tokens.shape))


@pytest.mark.parametrize(
    ("shape", "writes"), [(PLAIN, 2), (BeamShape(1, 4), 2), (BeamShape(2, 4), 4)]
)
def test_a_ring_is_written_by_one_operation_for_each_run_of_slots(
    shape: BeamShape, writes: int
) -> None:
    """As the slots of other layers are; nothing is gathered, and no mask is made for a layer."""
    layer = layer_launches(shape)
    assert layer["ScatterAxis"] == writes
    assert not {"DynamicSliceUpdate", "GatherAxis", "Gather", "Copy", "Concatenate"} & set(layer)
    assert not {"Remainder", "Scan"} & set(layer)


def test_a_step_updates_rings_in_place() -> None:
    """A copy would be in memory beside the ring."""
    model = sliding_model("gemma3_text", sliding_window=4096, head_dim=64)
    decoder = Decoder(Target(model), None, PLAIN, GREEDY)
    cache = decoder.new_cache()
    peak = peak_of_decoding(decoder, cache, [0] * 4608, 8)
    (window,) = windows_of(cache.target)
    assert window.capacity == ring_size(4096)
    assert peak < 1.3 * cache.target.nbytes


@pytest.mark.parametrize("shape", [PLAIN, BeamShape(1, 4), BeamShape(2, 4), BeamShape(30, 4)])
def test_a_drafter_reads_the_keys_of_the_window_from_the_ring(shape: BeamShape) -> None:
    """Those of the newest positions, as a cache that keeps all positions has them."""
    target, tokens = Target(sliding_model("gemma3_text")), text(LONG)
    tree, found = pack_beam(beams(shape), shape.nodes), []
    for cache in (target.new_cache(), target.new_cache(whole=True)):
        target.append(mx.array([tokens]), cache, 0)
        length = mx.array([LONG])
        target.verify(tree, cache, length, LONG)
        path = mx.arange(shape.length)[None]
        length = cache.commit(tree, path, mx.array([shape.length - 1]), length)
        read = cache.committed([0], length, LONG + shape.length)
        slots = {p: i for i, p in enumerate(read.positions[0][0].tolist()) if p >= 0}
        newest = range(LONG + shape.length - WINDOW, LONG + shape.length)
        assert slots.keys() >= {*newest}
        assert max(slots) == newest[-1]
        found.append(np.array(read.keys[0][0][:, mx.array([slots[p] for p in newest])]))
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)


def reused(target: Target, cache: SequenceCache, tokens: list[int], shared: int) -> int:
    """Return how much of a kept text a prompt that shares a part of it reuses; tokens are exact."""
    decoder, texts = Decoder(target, None, PLAIN, GREEDY), PrefixCache(10**9)
    texts.keep(cache, tokens, None)
    prompt = [*tokens[:shared], 9, 8]
    found = texts.take(prompt, None)
    if found is None:
        return 0
    row = Decoded(prompt, 12)
    for _ in decode(decoder, *found, prompt, sequence_keys(0), row.finished):
        pass
    assert row.emitted[:12] == plain_tokens(target.model, prompt, 12)
    return found[1]


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_a_prefix_is_reused_where_its_window_was_kept(name: str) -> None:
    """At the text's end, shortly before it, and at checkpoints; a short text anywhere."""
    target, tokens = Target(sliding_model(name)), text(LONG)

    def kept(n: int, *checkpoints: int) -> SequenceCache:
        cache = Decoder(target, None, PLAIN, GREEDY).new_cache()
        starts = [0, *checkpoints]
        for start, end in zip(starts, [*checkpoints, n], strict=True):
            target.append(mx.array([tokens[start:end]]), cache.target, start)
            cache.keep_states(end)
        return cache

    for shared, want in ((LONG, LONG), (LONG - 60, LONG - 60), (LONG - 70, 0)):
        assert reused(target, kept(LONG), tokens, shared) == want
    for shared, want in ((31, 0), (32, 32), (90, 80), (LONG - 10, LONG - 10)):
        assert reused(target, kept(LONG, 32, 80), tokens, shared) == want
    assert reused(target, kept(RING), tokens[:RING], 11) == 11


def engine(model: nn.Module, **options: object) -> Redrafter:
    given = EngineOptions(**options)  # type: ignore[arg-type]
    return Redrafter(model, byte_tokenizer(), host_drafters=(Lookup(),), engine=given)


def byte_sliding(name: str = "gemma3_text") -> nn.Module:
    return sliding_model(name, vocab_size=258, max_position_embeddings=4096)


def answered(redrafter: Redrafter, prompt: list[int], n: int) -> tuple[list[int], int]:
    """Return an answer, and how many tokens of its prompt were not read."""
    responses = [*redrafter.stream(prompt, max_tokens=n)]
    tokens = [response.token for response in responses]
    end = redrafter.tokenizer.eos_token_id
    assert tokens == up_to(end, plain_tokens(redrafter.target.model, prompt, n))
    return tokens, responses[-1].cached_tokens


def test_turns_edits_and_parted_prompts_are_read_from_where_windows_were_kept() -> None:
    redrafter, prompt = engine(byte_sliding()), text(600, vocab=256)
    answer, cached = answered(redrafter, prompt, 90)
    assert cached == 0
    second = prompt + answer + text(30, seed=1, vocab=256)
    assert answered(redrafter, second, 90)[1] >= len(prompt) + len(answer) - 1
    ended_otherwise = prompt[:-3] + text(40, seed=2, vocab=256)
    assert answered(redrafter, ended_otherwise, 8)[1] == len(prompt) - CHANGED_END
    parted = [prompt[:400] + text(300, seed=i, vocab=256) for i in (3, 4)]
    assert [answered(redrafter, each, 4)[1] for each in parted] == [0, 400]


def test_windows_are_there_after_a_restart(tmp_path: Path) -> None:
    model, prompt = byte_sliding(), text(600, vocab=256)
    first = engine(model, cache_dir=tmp_path / "c")
    answer, _ = answered(first, prompt, 90)
    ended(first)
    for following, cached in (
        (prompt + answer + text(9, seed=1, vocab=256), len(prompt) + len(answer) - 1),
        (prompt[:-4] + text(9, seed=2, vocab=256), len(prompt) - CHANGED_END),
    ):
        second = engine(model, cache_dir=tmp_path / "c")
        assert answered(second, following, 8)[1] == cached
        ended(second)


def test_windows_are_kept_seldom_enough_to_be_small() -> None:
    assert stops(0, 20_000, 0, 512) == [4096, 8192, 12288, 16384, 20_000 - CHANGED_END]
    assert stops(0, 20_000, 7000, 4096) == [7000, 20_000 - CHANGED_END]
    assert stops(0, 500, 100, 512) == []


def test_memory_is_reserved_for_windows_as_they_are() -> None:
    """A longer text takes more of the other layers alone."""
    target = Target(sliding_model("gemma3_text", max_position_embeddings=40_000))
    budget = MemoryBudget(target, EngineOptions())
    (whole,) = [layer for layer in read(target, [1]).attention if layer.window is None]
    more = budget.needed(20_480) - budget.needed(10_240)
    assert more == 10_240 * whole.slot_bytes
    short = MemoryBudget(Target(sliding_model("gemma3_text", sliding_window=8192)), EngineOptions())
    assert short.needed(256) < budget.needed(256) + 4 * whole.slot_bytes * 256
