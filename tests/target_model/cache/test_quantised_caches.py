"""Keys and values in 8 or 4 bits: the target is another one, and drafts change none of its tokens.

mlx-lm's own loop on its own `QuantizedKVCache` is the reference.
"""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from batches import Decoded, decode_together
from decoding import run, up_to
from ended import ended
from hybrids import hybrid_model
from latent import SPARSE
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from tiny import VOCAB, byte_model, byte_tokenizer, random_drafter, random_model, sliding_model

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.drop_in import stream_generate
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.memory import MemoryBudget
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.errors import BadInputError, UnsupportedModelError
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.cache.packed_cache import IN_ATTENTION, PackedCache
from redrafter_mlx.target_model.cache.plain import plain_caches
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.profile import random_tree
from redrafter_mlx.verification import verify

GREEDY = SamplingParams()
PROMPT = [3, 5, 7, 11, 13]
SHAPES = [BeamShape(1, 4), BeamShape(3, 4)]
MLA: dict[str, object] = {
    "kv_lora_rank": 32,
    "index_head_dim": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}

MODELS = {
    "whole text": lambda: random_model(head_dim=64),
    "groups of 32": lambda: random_model(head_dim=96),
    "rings": lambda: sliding_model("gemma3_text", head_dim=32, query_pre_attn_scalar=32),
    "attention of its own": lambda: random_model("gemma2", head_dim=32, query_pre_attn_scalar=32),
    "sinks": lambda: sliding_model("gpt_oss", head_dim=64),
    "recurrent": lambda: hybrid_model("qwen3_5", head_dim=32),
    "latent": lambda: hybrid_model("kimi_linear", **MLA),
}

BITS = dict(zip(MODELS, [8, 4, 4, 8, 4, 8, 4], strict=True))
CASES = [*((name, bits, False, 0) for name, bits in BITS.items()),
         ("whole text", 4, True, 0), ("recurrent", 8, True, 0),
         *(("whole text", 4, False, start) for start in (3, 5, 9, 12, 400)),
         *((name, 4, name == "recurrent", 11) for name in MODELS)]  # fmt: skip


def multiply_in_attention(monkeypatch: pytest.MonkeyPatch, ours: bool = True) -> None:
    """Let attention multiply by quantised keys, as on Apple's chips, or not, as on CPUs."""
    for device in IN_ATTENTION:
        monkeypatch.setitem(IN_ATTENTION, device, ours)


def mlx_lm_tokens(target: Target, prompt: list[int], n: int) -> list[int]:
    """Return the tokens of mlx-lm's own greedy loop on quantised caches."""
    caches = plain_caches(target.plain, target.packing)
    steps = generate_step(mx.array(prompt), target.plain, max_tokens=n, prompt_cache=caches)
    return [int(token) for token, _ in steps]


def words_of(layer: PackedCache, n: int) -> list[mx.array]:
    return [a[:, :, :n] for a in layer.slots]


@pytest.mark.parametrize("name", MODELS)
def test_attention_that_takes_no_quantised_keys_is_given_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_in_attention(monkeypatch)
    packing = Target(MODELS[name](), kv_bits=8).packing
    assert packing is not None
    assert packing.in_attention == (name not in ("attention of its own", "sinks", "latent"))


@pytest.mark.parametrize(("name", "bits", "in_attention", "start"), CASES, ids=str)
def test_drafted_tokens_equal_mlx_lms_with_the_same_bits(
    name: str, bits: int, in_attention: bool, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_in_attention(monkeypatch, in_attention)
    target = Target(MODELS[name](), kv_bits=bits, quantized_kv_start=start)
    want = mlx_lm_tokens(target, PROMPT, 25)
    assert run(Decoder(target, None, PLAIN, GREEDY), PROMPT, 25)[0] == want
    for shape in SHAPES:
        emitted, results = run(
            Decoder(target, Oracle(PROMPT + want, target.vocab_size), shape, GREEDY), PROMPT, 25
        )
        assert emitted == want
        assert max(len(r.tokens) for r in results) == shape.length


@pytest.mark.parametrize("bits", [8, 4])
def test_plain_tokens_equal_those_of_mlx_lms_quantised_cache_and_option(bits: int) -> None:
    """The option quantises a prompt's first chunk after it is read, which 8 bits do not tell."""
    model = random_model(head_dim=64, seed=1)
    caches = [QuantizedKVCache(64, bits) for _ in make_prompt_cache(model)]
    given: list[dict[str, object]] = [{"prompt_cache": caches}]
    if bits == 8:
        given.append({"kv_bits": bits, "quantized_kv_start": 0})
    emitted, _ = run(Decoder(Target(model, kv_bits=bits), None, PLAIN, GREEDY), PROMPT, 30)
    for options in given:
        steps = generate_step(mx.array(PROMPT), model, max_tokens=30, **options)
        assert emitted == [int(token) for token, _ in steps]
    assert len({*emitted}) > 2


@pytest.mark.parametrize(
    ("name", "temperature", "bits", "start"),
    [("whole text", 0.0, 8, 0), ("whole text", 0.8, 4, 0), ("rings", 0.8, 8, 0),
     ("recurrent", 0.0, 4, 0), ("whole text", 0.8, 4, 20), ("rings", 0.0, 4, 70)],
)  # fmt: skip
def test_rows_that_join_and_leave_are_decoded_as_if_alone(
    name: str, temperature: float, bits: int, start: int
) -> None:
    params = SamplingParams(temperature)
    target = Target(MODELS[name](), kv_bits=bits, quantized_kv_start=start)
    shape = BeamShape(2, 4)
    decoder = Decoder(target, None, shape, params, host_drafters=(Lookup(1),))
    rng = random.Random(bits)
    rows = [
        Decoded([rng.randrange(VOCAB) for _ in range(n)], m, n, params)
        for n, m in ((5, 30), (90, 12), (40, 25), (3, 9))
    ]
    decode_together(decoder, rows)
    plain = Decoder(target, None, PLAIN, params)
    for row in rows:
        assert row.emitted[: row.n] == row.alone(plain).emitted[: row.n]


def test_a_trees_path_is_moved_bit_by_bit() -> None:
    """Words, scales and biases of the accepted nodes, which are not quantised again."""
    target = Target(random_model(head_dim=64), kv_bits=4)
    cache, tree, n = target.new_cache(), random_tree(7, VOCAB), len(PROMPT)
    target.append(mx.array([PROMPT]), cache, 0)
    target.verify(tree, cache, mx.array([n]), n)
    layers = [layer for layer in cache.attention if isinstance(layer, PackedCache)]
    nodes = [[mx.array(a) for a in layer.tree_nodes] for layer in layers]
    mx.eval(nodes)
    path = next(i for i in range(2, 7) if tree.depths[0, i].item() == 1)
    cache.commit(tree, mx.array([[0, path]]), mx.array([1]), mx.array([n]))
    cache.flush()
    for layer, held in zip(layers, nodes, strict=True):
        for slots, of_tree in zip(layer.slots, held, strict=True):
            moved = slots[:, :, n : n + 2]
            assert mx.array_equal(moved, of_tree[:, :, mx.array([0, path])])


def test_a_position_is_quantised_alike_by_prompts_steps_and_trees() -> None:
    """Up to roundings of the numbers, which move few of them by a step of the quantisation."""
    target = Target(random_model(head_dim=64), kv_bits=8)
    plain, _ = run(Decoder(target, None, PLAIN, GREEDY), PROMPT, 20)
    text = PROMPT + plain
    caches = []
    for decoder in (
        Decoder(target, None, PLAIN, GREEDY),
        Decoder(target, Oracle(text, VOCAB), BeamShape(3, 4), GREEDY),
    ):
        cache = decoder.new_cache()
        run(decoder, PROMPT, 20, cache=cache)
        cache.target.flush()
        caches.append(cache.target)
    read = target.new_cache()
    for at in range(0, 20, 5):
        target.append(mx.array([text[at : at + 5]]), read, at)
    for cache in caches:
        for mine, theirs in zip(cache.attention, read.attention, strict=True):
            assert isinstance(mine, PackedCache)
            assert isinstance(theirs, PackedCache)
            pairs = zip(words_of(mine, 20), words_of(theirs, 20), strict=True)
            for a, b in pairs:
                if a.dtype == mx.uint32:
                    bytes_a, bytes_b = (x.view(mx.uint8).astype(mx.int32) for x in (a, b))
                    apart = mx.abs(bytes_a - bytes_b)
                    assert mx.max(apart).item() <= 1
                    assert mx.mean(apart).item() < 0.01
                else:
                    assert mx.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_the_first_positions_take_what_they_take_whole() -> None:
    """Beside the quantised ones, and one slot more for what later positions write."""
    model = random_model(head_dim=64)
    caches = []
    for start in (0, 100, 5_000):
        target = Target(model, kv_bits=8, quantized_kv_start=start)
        cache = target.new_cache()
        target.append(mx.array([[1] * 300]), cache, 0)
        caches.append(cache)
        for kept in (300, 64):
            cache.trim(kept)
            assert cache.trimmed_size(kept) == (cache.nbytes, len(cache.buffers))
    whole = Target(model).new_cache()
    Target(model).append(mx.array([[1] * 300]), whole, 0)
    none, some, all_ = caches
    assert all_.nbytes - none.nbytes == whole.nbytes * 64 / whole.capacity
    assert none.ring_bytes == {}
    (ring,) = some.ring_bytes.items()
    assert ring == (101, whole.nbytes / whole.capacity)


@pytest.mark.parametrize(("bits", "share"), [(8, 9 / 32), (4, 5 / 32)])
def test_a_cache_takes_what_its_bits_say(bits: int, share: float) -> None:
    """In groups of 64 float32: 64 numbers of so many bits, a scale and a bias."""
    model = random_model(head_dim=64)
    sizes, slots = [], []
    for target in (Target(model), Target(model, kv_bits=bits)):
        cache = target.new_cache()
        target.append(mx.array([PROMPT]), cache, 0)
        sizes.append(cache.nbytes)
        slots.append(MemoryBudget(target, EngineOptions()).slot)
        cache.trim(len(PROMPT))
        assert cache.trimmed_size(len(PROMPT)) == (cache.nbytes, len(cache.buffers))
    assert sizes[1] == sizes[0] * share
    layer = sizes[0] / 256 / 2
    assert slots[1] == slots[0] * share + 2 * layer, "and two layers at a time are dequantised"


def test_rings_and_states_stay_as_they_are() -> None:
    for name in ("rings", "recurrent"):
        target = Target(MODELS[name](), kv_bits=8)
        kinds = {type(layer).__name__ for layer in target.new_cache().layers}
        assert kinds == {"PackedCache", {"rings": "WindowCache"}.get(name, "StateCache")}


@pytest.mark.parametrize("in_attention", [False, True])
def test_buffers_are_written_in_place(in_attention: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the attention of two layers reads is in memory, too, and no buffer's copy."""
    multiply_in_attention(monkeypatch, in_attention)
    model = random_model(
        num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=2, head_dim=64
    )
    target, prompt = Target(model, kv_bits=8), [i % VOCAB for i in range(3_000)]
    for shape in (PLAIN, BeamShape(2, 3)):
        decoder = Decoder(target, random_drafter().bind(target), shape, GREEDY)
        cache = decoder.new_cache()
        run(decoder, prompt, 3, cache=cache)
        held = cache.target
        tree, length = random_tree(shape.nodes, VOCAB), mx.array([3_000])
        for _ in range(3):
            mx.eval(held.buffers)
            mx.clear_cache()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            hidden, _ = target.verify(tree, held, length, 3_000)
            held.commit(tree, mx.zeros((1, 1), mx.int32), mx.array([0]), length)
            mx.eval(hidden, held.buffers)
        more = mx.get_peak_memory() - before
        assert more < (0.3 if in_attention else 1.0) * held.nbytes


def answered(redrafter: Redrafter, prompt: list[int], n: int = 12) -> tuple[list[int], int]:
    """Return an answer, and how many tokens of its prompt were not read."""
    responses = [*redrafter.stream(prompt, max_tokens=n)]
    tokens = [response.token for response in responses]
    want = mlx_lm_tokens(redrafter.target, prompt, n)
    assert tokens == up_to(redrafter.tokenizer.eos_token_id, want)
    return tokens, responses[-1].cached_tokens


def engine(model: nn.Module, bits: int | None, folder: Path, start: int = 0) -> Redrafter:
    target = Target(model, kv_bits=bits, quantized_kv_start=start)
    return Redrafter(
        model, byte_tokenizer(), host_drafters=(Lookup(),), target=target,
        engine=EngineOptions(cache_dir=folder),
    )  # fmt: skip


@pytest.mark.parametrize("start", [0, 150, 600])
@pytest.mark.parametrize("kind", ["whole text", "rings"])
def test_a_prefix_is_reused_and_there_after_a_restart_with_the_same_bits_alone(
    kind: str, start: int, tmp_path: Path
) -> None:
    sizes: dict[str, object] = {"vocab_size": 258, "max_position_embeddings": 4096}
    model = (
        byte_model(head_dim=64, max_position_embeddings=4096)
        if kind == "whole text"
        else sliding_model("gemma3_text", head_dim=32, query_pre_attn_scalar=32, **sizes)
    )
    prompt = [(7 * i + 3) % 256 for i in range(400)]
    first = engine(model, 8, tmp_path, start)
    answer, cached = answered(first, prompt)
    assert cached == 0
    again = [*prompt, *answer, 5, 6, 7]
    assert answered(first, again)[1] >= len(prompt) + len(answer) - 1
    answered(first, [*prompt[:100], *range(40)])
    ended(first)
    others = ((8, start, False), (4, start, True), (None, 0, True), (8, start + 1, True))
    for bits, begin, reads in others:
        other = engine(model, bits, tmp_path, begin)
        assert (answered(other, again)[1] == 0) == reads
        ended(other)


def test_a_report_says_that_the_bits_change_the_target_and_drafts_do_not() -> None:
    model = byte_model(seed=3, head_dim=64)
    redrafter = Redrafter(
        model, byte_tokenizer(), random_drafter(vocab_size=258), target=Target(model, kv_bits=4)
    )
    report = verify(redrafter, ["one", "two"], max_tokens=24, shape=BeamShape(2, 4), oracle=True)
    assert report.exact
    assert report.kv_packing == "4-bit keys and values"
    assert (report.kv_agreeing, report.tokens) == (22, 48)
    whole = verify(Redrafter(model, byte_tokenizer()), ["one"], max_tokens=4)
    assert (whole.kv_packing, whole.kv_agreeing) == (None, None)


def test_the_drop_in_takes_mlx_lms_option() -> None:
    model = byte_model(head_dim=64)
    got = [r.token for r in stream_generate(model, byte_tokenizer(), PROMPT, kv_bits=4,
                                            drafter="lookup", max_tokens=12)]  # fmt: skip
    want = mlx_lm_tokens(Target(model, kv_bits=4), PROMPT, 12)
    assert got == up_to(byte_tokenizer().eos_token_id, want)
    with pytest.raises(BadInputError, match="kv_bits is 3"):
        stream_generate(model, byte_tokenizer(), PROMPT, kv_bits=3)
    got = [r.token for r in stream_generate(model, byte_tokenizer(), PROMPT, kv_bits=4,
                                            quantized_kv_start=7, max_tokens=12)]  # fmt: skip
    assert got == mlx_lm_tokens(Target(model, kv_bits=4, quantized_kv_start=7), PROMPT, 12)
    with pytest.raises(BadInputError, match="without kv_bits"):
        stream_generate(model, byte_tokenizer(), PROMPT, quantized_kv_start=7)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda: random_model(head_dim=40), "kv_bits: .* 40"),
        (lambda: hybrid_model("mamba"), "nothing for kv_bits"),
        (lambda: random_model("deepseek_v32", **{**SPARSE, **MLA}), "kv_bits: it sets the values"),
    ],
)
def test_a_model_whose_keys_cannot_be_quantised_is_refused_by_name(
    model: object, named: str
) -> None:
    assert callable(model)
    made = model()
    with pytest.raises(UnsupportedModelError, match=rf"{made.model_type}.*{named}"):
        Target(made, kv_bits=8)


def test_keys_that_a_drafter_attends_to_are_those_of_the_quantised_cache() -> None:
    target = Target(random_model(head_dim=64), kv_bits=8)
    caches: list[TreeCache] = [Target(target.model).new_cache(), target.new_cache()]
    for of, cache in zip((Target(target.model), target), caches, strict=True):
        of.append(mx.array([PROMPT]), cache, 0)
    whole, quantised = (c.committed([0], mx.array([5]), 5) for c in caches)
    assert quantised.keys[0].shape == whole.keys[0].shape
    assert mx.allclose(quantised.keys[0][:, :, :5], whole.keys[0][:, :, :5], atol=0.05)
    assert not mx.array_equal(quantised.keys[0], whole.keys[0])
