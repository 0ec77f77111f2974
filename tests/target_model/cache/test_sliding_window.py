"""Models whose layers see a sliding window of the text, against mlx-lm's own rotating cache."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from batches import Decoded, decode_together
from decoding import run
from draft_models import drafter_for
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from tiny import SLIDING, VOCAB, WINDOW, byte_tokenizer, plain_tokens, random_model, sliding_model
from trees import assert_tree_equals_sequences

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.cache.prefix_cache import PrefixCache
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.distill.corpus.reader import continuations
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target_model.cache import plans
from redrafter_mlx.target_model.cache.layer_cache import LayerCache
from redrafter_mlx.target_model.cache.slots import windowed
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.tree_check import check_trees

GREEDY = SamplingParams()
SHAPE = BeamShape(3, 4)
PROMPTS = [[(7 * i + 3) % 90 for i in range(n)] for n in (21, 5, 13)]


def test_a_window_lets_nodes_see_the_newest_positions_of_their_path() -> None:
    """The drawing in `windowed`."""
    mask = mx.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]).astype(mx.bool_)
    for size, drawing in (
        (3, [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 1, 1, 0, 1]]),
        (2, [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 1]]),
    ):
        assert windowed(mask, size).astype(mx.int32).tolist() == drawing


@pytest.mark.parametrize("name", SLIDING)
@pytest.mark.parametrize("batch", [1, 2])
def test_tree_logits_equal_sequential_logits(name: str, batch: int) -> None:
    """The second prompt is shorter than the window."""
    assert_tree_equals_sequences(sliding_model(name), batch, 1e-4, PROMPTS)


@pytest.mark.parametrize("name", SLIDING)
@pytest.mark.parametrize("shape", [PLAIN, SHAPE])
def test_tokens_equal_autoregression(name: str, shape: BeamShape) -> None:
    model = sliding_model(name)
    assert any(isinstance(c, RotatingKVCache) for c in make_prompt_cache(model))
    for prompt in PROMPTS[:2]:
        text = prompt + plain_tokens(model, prompt, 70)
        decoder = Decoder(Target(model), Oracle(text, VOCAB), shape, GREEDY)
        emitted, results = run(decoder, prompt, 60)
        assert emitted == text[len(prompt) :][:60]
        assert max(len(r.tokens) for r in results) == shape.length


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "ministral3"])
def test_rows_of_different_length_are_decoded_as_if_alone(name: str) -> None:
    model = sliding_model(name)
    decoder = Decoder(Target(model), None, SHAPE, GREEDY, host_drafters=(Lookup(1),))
    rows = [Decoded(prompt, 40) for prompt in PROMPTS]
    decode_together(decoder, rows)
    for row in rows:
        assert row.emitted[:40] == plain_tokens(model, row.prompt, 40)


def test_prompts_read_in_chunks_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sliding_model("gemma3_text")
    decoder = Decoder(Target(model), None, PLAIN, GREEDY)
    for chunk in (1, 5, WINDOW, 13):
        monkeypatch.setattr("redrafter_mlx.decoding.step.PREFILL_CHUNK", chunk)
        assert run(decoder, PROMPTS[0], 5)[0] == plain_tokens(model, PROMPTS[0], 5)


def keys_read(
    monkeypatch: pytest.MonkeyPatch, target: Target, call: Callable[[], object]
) -> set[tuple[int | None, int]]:
    """Return the window of each layer, and the number of keys that it reads in a call."""
    fetch, read = LayerCache.update_and_fetch, set[tuple[int | None, int]]()

    def recorded(layer: LayerCache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        found = fetch(layer, keys, values)
        read.add((layer.window, found[0].shape[2]))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(LayerCache, "update_and_fetch", recorded)
        call()
    assert any(window is not None for window, _ in read) == bool(target.windows)
    return read


@pytest.mark.parametrize("name", SLIDING)
def test_a_chunk_of_a_prompt_reads_the_keys_of_its_window_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(sliding_model(name))
    cache, tokens = target.new_cache(), mx.array([[i % VOCAB for i in range(45)]])
    target.append(tokens[:, :40], cache, 0)
    read = keys_read(monkeypatch, target, lambda: target.append(tokens[:, 40:], cache, 40))
    assert read == {(WINDOW, 5 + WINDOW - 1), (None, 45)}


def test_layers_whose_mask_is_of_a_cache_without_a_window_read_all_keys() -> None:
    model = sliding_model("gemma3_text", num_hidden_layers=3, sliding_window_pattern=3)
    assert [*Target(model).windows] == [0, 1]
    want = Target(model).append(mx.array(PROMPTS[:1]), Target(model).new_cache(), 0)
    model.make_cache = lambda: [KVCache(), RotatingKVCache(WINDOW), KVCache()]
    target = Target(model)
    assert not target.windows
    hidden = target.append(mx.array(PROMPTS[:1]), target.new_cache(), 0)
    np.testing.assert_allclose(hidden, want, rtol=1e-4, atol=1e-4)


def test_a_prefix_is_valid_however_long_the_text_after_it_was() -> None:
    """mlx-lm's rotating cache has overwritten the end of such a prefix."""
    model = sliding_model("gemma3_text")
    decoder = Decoder(Target(model), None, PLAIN, GREEDY)
    texts, text = PrefixCache(10**9), [i % VOCAB for i in range(1, 41)]
    cache = decoder.new_cache()
    mx.eval(decoder.target.append(mx.array([text]), cache.target, 0))
    texts.keep(cache, text, None)
    for shared in (40, 12, 5):
        prompt = [*text[:shared], 9]
        found = texts.take(prompt, None)
        assert found is not None
        assert found[1] == shared
        row = Decoded(prompt, 20)
        for _ in decode(decoder, *found, prompt, sequence_keys(0), row.finished):
            pass
        assert row.emitted == plain_tokens(model, prompt, 20)


def test_a_session_goes_on_from_the_text_that_it_kept() -> None:
    model = sliding_model("gemma3_text", vocab_size=258)
    redrafter, fresh = (
        Redrafter(model, byte_tokenizer(), host_drafters=(Lookup(),)) for _ in range(2)
    )
    session = redrafter.session()
    for _ in range(3):
        said = "".join(r.text for r in session.stream("abc abc abc", max_tokens=20))
        history = session.messages[:-1]
        assert said == fresh.generate(history, max_tokens=20, cache_prompt=False, draft=False).text


def test_a_draft_model_with_windows_drafts_the_tokens_of_its_own() -> None:
    model = sliding_model("gemma3_text")
    target = Target(model)
    decoder = Decoder(target, drafter_for(target, model), BeamShape(1, 4), GREEDY)
    emitted, results = run(decoder, PROMPTS[0], 40)
    assert emitted == plain_tokens(model, PROMPTS[0], 40)
    assert all(len(r.tokens) == 4 for r in results[1:])


def test_forks_of_a_text_continue_it_as_sequences() -> None:
    model = sliding_model("olmo3")
    target, (tokens, *_), first = Target(model), PROMPTS, 4
    got = continuations(target, tokens, first, length=9)
    want = [plain_tokens(model, tokens[: first + j], 10) for j in range(len(tokens) - first)]
    assert got.tolist() == want


@pytest.mark.parametrize("name", SLIDING)
def test_the_check_at_loading_sees_beyond_a_short_window(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_trees(Target(sliding_model(name))) < 1e-3
    honest = plans.ring_mask

    def wide(mask: mx.array, depths: mx.array, length: mx.array, _: int, *rest: int, **at: bool):
        return honest(mask, depths, length, 64, *rest, **at)

    monkeypatch.setattr(plans, "ring_mask", wide)
    with pytest.raises(UnsupportedModelError, match=f"{name}.*a tree's logits"):
        check_trees(Target(sliding_model(name)))


def test_masks_of_another_window_than_the_caches_hold_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"hold \[8\] positions, its masks \[9\]"):
        Target(random_model("plamo3", sliding_window=8, head_dim=8, sliding_window_pattern=2))


def test_the_text_of_a_model_that_also_reads_pictures_is_drafted_for() -> None:
    text = sliding_model("gemma3_text")
    module = importlib.import_module("mlx_lm.models.gemma3")
    config = {**vars(cast(nn.Module, text).args)}
    whole = module.Model(
        module.ModelArgs(model_type="gemma3", text_config=config, vocab_size=VOCAB)
    )
    whole.language_model.update(text.parameters())
    target = Target(whole)
    hidden = target.append(mx.array([PROMPTS[0]]), target.new_cache(), 0)
    want = whole(mx.array([PROMPTS[0]]))
    np.testing.assert_allclose(target.logits(hidden), want, rtol=1e-4, atol=1e-4)
