"""Caches of earlier texts: what is kept, what is dropped, and what keeping costs."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from tiny import plain_tokens, random_model
from trees import prefilled_slots, slots

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.cache import prefix_cache
from redrafter_mlx.decoding.cache.prefix_cache import PrefixCache, common_prefix
from redrafter_mlx.decoding.cache.sequence_cache import SequenceCache
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.state import Drafts
from redrafter_mlx.decoding.step import Decoder, Prefill
from redrafter_mlx.drafting.interface import Features, Memory, Seen
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.response import StepResult
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.cache.slots import planned_capacity
from redrafter_mlx.target_model.model import Target


def read(decoder: Decoder, tokens: list[int]) -> SequenceCache:
    """Return the cache after reading a text."""
    cache = decoder.new_cache()
    decoder.target.append(mx.array([tokens]), cache.target, 0)
    return cache


def test_a_prefix_cache_returns_only_what_the_next_prompt_shares() -> None:
    texts = PrefixCache(10**9)
    decoder = Decoder(Target(random_model()), None, PLAIN, SamplingParams())
    assert texts.take([1, 2, 3], None) is None
    texts.keep(read(decoder, [1, 2, 3, 4]), [1, 2, 3, 4], None)
    for prompt, shared in (([1, 2, 3, 9, 9], 3), ([1, 2, 3], 2), ([1, 2, 3, 4, 5], 4)):
        found = texts.take(prompt, None)
        assert found is not None
        assert found[1] == shared, "the last token of a prompt is always read again"
    assert texts.take([2, 1], None) is None


def test_of_a_drafter_that_reads_pairs_of_positions_the_last_shared_one_is_read_again() -> None:
    """EAGLE remembers each position with the token after it, which belongs to the old text."""

    class Reader(Oracle):
        features = Features(hidden=True, every_position=True)

    texts, drafter = PrefixCache(10**9), Reader([1], 100)
    decoder = Decoder(Target(random_model()), drafter, PLAIN, SamplingParams())
    cache = read(decoder, [1, 2, 3, 4])
    cache.remembered = mx.array([4], mx.int32)
    texts.keep(cache, [1, 2, 3, 4], drafter)
    for prompt, shared in (([1, 2, 3, 9, 9], 2), ([1, 2, 3], 2), ([1, 2, 3, 4, 5], 3)):
        found = texts.take(prompt, drafter)
        assert found is not None
        assert found[1] == found[0].remembered.item() == shared
    assert texts.take([1, 9, 9], drafter) is None


def test_the_least_recently_used_text_is_let_go_of_first() -> None:
    decoder = Decoder(Target(random_model()), None, PLAIN, SamplingParams())
    one = read(decoder, [1, 1, 1]).trimmed_size(3)[0]
    texts = PrefixCache(2 * one)
    for first in (1, 2):
        texts.keep(read(decoder, [first] * 3), [first] * 3, None)
    texts.take([1, 1, 1], None)
    texts.keep(read(decoder, [3] * 3), [3] * 3, None)
    assert [texts.take([n] * 3, None) is not None for n in (1, 2, 3)] == [True, False, True]
    assert texts.nbytes == 2 * one


def test_a_text_that_another_one_continues_is_not_kept_twice() -> None:
    decoder = Decoder(Target(random_model()), None, PLAIN, SamplingParams())
    texts = PrefixCache(10**9)
    for n in (3, 5, 4):
        texts.keep(read(decoder, [7] * n), [7] * n, None)
    assert texts.nbytes == read(decoder, [7] * 5).trimmed_size(5)[0]


def test_what_was_handed_out_changes_no_kept_text() -> None:
    """Two answers continue the same text, one from its middle."""
    model = random_model(seed=3)
    decoder = Decoder(Target(model), None, PLAIN, SamplingParams())
    texts, text = PrefixCache(10**9), [i % 97 for i in range(1, 41)]
    texts.keep(read(decoder, text), text, None)
    for prompt in ([*text, 5], [*text[:20], 9], [*text, 5], [*text[:39], 1, 2]):
        found = texts.take(prompt, None)
        assert found is not None
        emitted: list[int] = []

        def finished(result: StepResult, emitted: list[int] = emitted) -> bool:
            emitted.extend(result.tokens)
            return len(emitted) == 20

        for _ in decode(decoder, *found, prompt, sequence_keys(0), finished):
            pass
        assert emitted == plain_tokens(model, prompt, 20)


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(Target(random_model()), None, PLAIN, SamplingParams())


def filled(layers: int, capacity: int, batch: int = 1) -> SequenceCache:
    """Return a computed cache of zeros, 64 KB for each buffer's 256 slots and batch row."""
    target = TreeCache(layers)
    for layer in target.layers:
        layer.keys, layer.values = (mx.zeros((batch, 2, capacity, 32)) for _ in range(2))
    mx.eval(target.buffers)
    return SequenceCache(target, (), batch)


def peak_while_keeping(
    texts: PrefixCache, cache: SequenceCache, tokens: list[int]
) -> tuple[int, int]:
    """Return the bytes in memory before a text is kept, and the most until it is."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    texts.keep(cache, tokens, None)
    return before, max(mx.get_peak_memory(), before)


_SMALL = 4096
"""Bytes of the few numbers that keeping a text may compute beside its cache."""


def test_a_text_that_is_too_large_drops_no_other(decoder: Decoder) -> None:
    small, large = [1] * 30, [2] * 300
    texts = PrefixCache(read(decoder, large).trimmed_size(300)[0] - 1)
    texts.keep(read(decoder, small), small, None)
    texts.keep(read(decoder, large), large, None)
    assert texts.take(large, None) is None
    assert texts.take([*small, 3], None) is not None


@pytest.mark.parametrize("batch", [1, 2])
def test_no_more_than_a_layer_is_in_memory_twice_while_a_text_is_kept(batch: int) -> None:
    """A batch's row is a copy, which is made layer by layer too."""
    cache = filled(24, 1024, batch)
    held = cache.nbytes // 24
    if batch > 1:
        cache = cache.take([1])
    texts = PrefixCache(10**9)
    before, peak = peak_while_keeping(texts, cache, [1] * 700)
    kept = texts.nbytes if batch > 1 else 0
    assert peak - before <= kept + 2 * held + _SMALL
    assert mx.get_active_memory() < before + kept
    assert cache.nbytes == texts.nbytes == 24 * 2 * 704 * 256


def test_buffers_of_the_right_size_are_not_copied() -> None:
    before, peak = peak_while_keeping(PrefixCache(10**9), filled(24, 1024), [1] * 1000)
    assert peak - before <= _SMALL


@pytest.mark.parametrize("why", ["too large", "kept already"])
def test_nothing_is_computed_for_a_text_that_is_not_kept(why: str) -> None:
    """Not even the row's copy of its batch's cache."""
    texts = PrefixCache(0 if why == "too large" else 10**9)
    texts.keep(filled(24, 1024), [1] * 1000, None)
    rows = filled(24, 1024, 2)
    before, peak = peak_while_keeping(texts, rows.take([1]), [1] * 700)
    assert peak - before <= _SMALL


@pytest.mark.parametrize("shape", [BeamShape(1, 1), BeamShape(1, 4), BeamShape(3, 4)], ids=str)
def test_a_kept_cache_after_an_answer_equals_prefill(shape: BeamShape) -> None:
    """The accepted path's keys and values are moved to their slots when the text is kept."""
    model = random_model()
    text = [3, 5, 7, *plain_tokens(model, [3, 5, 7], 60)]
    target = Target(model)
    decoder = Decoder(target, Oracle(text, 97), shape, SamplingParams())
    cache = decoder.new_cache()
    emitted: list[int] = []

    def finished(result: StepResult) -> bool:
        emitted.extend(result.tokens)
        return len(emitted) >= 40

    for _ in decode(decoder, cache, 0, text[:3], sequence_keys(0), finished):
        pass
    assert (cache.target.pending is not None) == (shape.width > 1)
    known, texts = text[: 2 + len(emitted)], PrefixCache(10**9)
    texts.keep(cache, known, None)
    found = texts.take(known, None)
    assert found is not None
    for got, want in zip(
        slots(found[0].target, 0, len(known) - 1), prefilled_slots(target, known[:-1]), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opened", [[], [93, 94]], ids=["", "the prompt opens the reasoning"])
@pytest.mark.parametrize("reasoning", [10, 200])
def test_turns_whose_reasoning_is_dropped_are_not_all_kept(
    decoder: Decoder, reasoning: int, opened: list[int]
) -> None:
    """Chat templates drop it from earlier answers, so that no text continues the one before."""
    texts, history = PrefixCache(10**9), [i % 90 for i in range(30)]
    for turn in range(6):
        asked = [*history, 90, *range(turn, turn + 12), 91]
        prompt = [*asked, *opened]
        found = texts.take(prompt, None)
        assert turn == 0 or (found is not None and found[1] == len(history) - 8)
        answer = [turn + 20] * 8
        text = [*prompt, *[92] * reasoning, *answer]
        texts.keep(read(decoder, text), text, None, len(prompt))
        assert len(texts.entries) <= 2
        history = [*asked, *answer]


def test_branches_of_a_conversation_are_all_kept(decoder: Decoder) -> None:
    """Several questions about one text, and several answers to one question."""
    texts, document = PrefixCache(10**9), [i % 90 for i in range(200)]
    branches = []
    for branch in range(4):
        prompt = [*document, *[branch] * 12]
        for answer in ([91] * 20, [92] * 20):
            found = texts.take(prompt, None)
            assert not branches or (found is not None and found[1] >= len(document))
            branches.append([*prompt, *answer])
            texts.keep(read(decoder, branches[-1]), branches[-1], None, len(prompt))
    longer = [*branches[0], *[5] * 12, *[91] * 20]  # a second question after one of the answers
    texts.keep(read(decoder, longer), longer, None, len(longer) - 20)
    for text in branches:
        found = texts.take([*text, 5], None)
        assert found is not None
        assert found[1] == len(text)


def test_the_size_of_a_text_is_computed_once(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [0]
    honest = SequenceCache.trimmed_size

    def counted(self: SequenceCache, length: int) -> tuple[int, int]:
        sizes[0] += 1
        return honest(self, length)

    caches = [read(decoder, [n] * 3) for n in range(1, 61)]
    texts = PrefixCache(20 * caches[0].trimmed_size(3)[0])
    with monkeypatch.context() as patched:
        patched.setattr(SequenceCache, "trimmed_size", counted)
        patched.setattr(SequenceCache, "nbytes", property(lambda _: pytest.fail("counted again")))
        for n, cache in enumerate(caches, 1):
            texts.keep(cache, [n] * 3, None)
        held = len(texts.entries)
        texts.shrink(texts.nbytes // 2)
    assert sizes == [60]
    assert (held, len(texts.entries)) == (20, 10)
    assert texts.nbytes == sum(entry.cache.nbytes for entry in texts.entries)


def test_the_number_of_buffers_is_limited_too(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "MAX_BUFFERS", 4 * 5 + 3)  # of 2 layers
    texts = PrefixCache(10**9)
    for n in range(1, 21):
        texts.keep(read(decoder, [n] * 3), [n] * 3, None)
        buffers = sum(len(entry.cache.target.buffers) for entry in texts.entries)
        assert buffers == texts.n_buffers <= 4 * 5
    assert len(texts.entries) == 5


@pytest.mark.parametrize("chunk", [1, 7, 255, 256, 511, 512, 700])
def test_features_of_few_positions_are_kept_for_any_size_of_chunks(chunk: int) -> None:
    class Reader(Oracle):
        features = Features(hidden=True, every_position=True)
        read = 0

        def extend(self, memory: Memory, seen: Seen) -> Memory:
            self.read += seen.tokens.shape[1] - 1
            return memory

    drafter, cache = Reader([1], 100), filled(1, 32)
    for start in range(0, 3000, chunk):
        tokens, at = mx.zeros((1, chunk + 1), mx.int32), mx.array([start])
        count = mx.array([chunk])
        seen = Seen(tokens, mx.zeros((1, chunk, 4)), at, count, start + chunk, start)
        cache.show(seen, drafter, drafts=False)
        missed = sum(seen.tokens.shape[1] - 1 for seen in cache.missed)
        assert missed < 512
        assert missed + drafter.read == start + chunk


@pytest.mark.parametrize(("chunk", "prompt"), [(50, 600), (100, 257), (7, 40), (2048, 500)])
def test_a_prompt_grows_the_buffers_once(decoder: Decoder, chunk: int, prompt: int) -> None:
    tokens = [i % 97 for i in range(prompt)]
    prefill = Prefill(decoder.target, None, decoder.new_cache(), 0, [tokens, tokens])
    capacities = set()
    while prefill.left:
        prefill.read(chunk)
        capacities.add(prefill.cache.target.capacity)
    length = mx.array([prompt])
    decoder.target.verify(Drafts.plain(mx.array([1, 1])).tree, prefill.cache.target, length, prompt)
    assert capacities == {prefill.cache.target.capacity} == {planned_capacity(prompt, 1)}


@pytest.mark.parametrize("prompt", [60, 300, 900])
def test_of_a_longer_text_only_the_shared_prefix_is_copied(decoder: Decoder, prompt: int) -> None:
    texts, text = PrefixCache(10**9), [i % 97 for i in range(700)]
    texts.keep(read(decoder, text), text, None)
    tokens = [*text[: prompt // 2], *[96] * (prompt - prompt // 2)]
    found = texts.take(tokens, None)
    assert found is not None
    assert found[0].nbytes < texts.nbytes
    prefill = Prefill(decoder.target, None, *found, [tokens])
    capacities = set()
    while prefill.left:
        prefill.read(100)
        capacities.add(prefill.cache.target.capacity)
    assert capacities == {planned_capacity(prompt, 1)}
    for got, want in zip(
        slots(prefill.cache.target, 0, prompt), prefilled_slots(decoder.target, tokens), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
