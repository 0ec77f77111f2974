"""A draft language model: its trees, its cache, and its cost, against plain decoding."""

from __future__ import annotations

import decoding
import mlx.core as mx
import numpy as np
import pytest
from backends import frees_at_once
from decoding import counted_reads, peak_of_decoding
from draft_models import GREEDY, PROMPT, decoder_with, drafter_for, remembers_the_text, run
from hybrids import hybrid_model
from joint import V as FEW
from joint import fits, tiny_target
from joint import small_buffers as small_buffers
from mlx_lm.generate import speculative_generate_step
from policies import Alternating
from tiny import VOCAB, Words, byte_model, byte_tokenizer, plain_tokens, random_model, truncated

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.cache import sequence_cache
from redrafter_mlx.decoding.cache.prefix_cache import PrefixCache
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.draft_model import DraftModel, check_same_tokens
from redrafter_mlx.drafting.interface import Memory, Seen
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import MismatchError
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.recurrent.state_cache import StateCache

SHAPES = [BeamShape(1, 2), BeamShape(1, 4), BeamShape(2, 3), BeamShape(3, 4), BeamShape(4, 5, 9)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_tokens_equal_autoregression(name: str, shape: BeamShape) -> None:
    model = random_model(name, num_hidden_layers=3)
    emitted, results, _ = run(decoder_with(model, truncated(model, 2), shape), 60)
    assert emitted == plain_tokens(model, PROMPT, 60)
    assert len({len(r.tokens) for r in results}) > 1, "acceptances of several lengths occurred"


RECURRENT = ["qwen3_5", "falcon_h1", "lfm2"]


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]], ids=str)
@pytest.mark.parametrize("name", RECURRENT)
def test_tokens_equal_autoregression_with_a_recurrent_draft_model(
    name: str, shape: BeamShape
) -> None:
    """The target itself drafts, and is accepted whole if one beam follows its argmax."""
    model = hybrid_model(name)
    emitted, results, _ = run(decoder_with(model, model, shape), 60)
    assert emitted == plain_tokens(model, PROMPT, 60)
    if shape.width == 1:
        assert {len(r.tokens) for r in results[1:]} == {shape.length}


@pytest.mark.parametrize("shape", [BeamShape(1, 4), BeamShape(3, 4)], ids=str)
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        *(SamplingParams(temperature) for temperature in (0.3, 1.0, 2.0)),
        SamplingParams(1.0, accept="rejection", top_p=0.9),
    ],
    ids=lambda p: f"{p.method} {p.temperature:g}",
)
def test_the_target_itself_is_accepted_whole(params: SamplingParams, shape: BeamShape) -> None:
    """By `sample`, one beam drafts the very draws; by rejection, it is accepted because q = p.

    For the argmax, the model is very certain, so that its candidate is among the likeliest.
    """
    model = random_model("llama (mistral-style)")
    if params.greedy:
        model.lm_head.weight = model.lm_head.weight * 100
    if not params.greedy:
        shape = BeamShape(1, shape.length)
    _, results, _ = run(decoder_with(model, model, shape, params), 80)
    assert {len(r.tokens) for r in results[1:]} == {shape.length}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("accept", ["sample", "rejection"])
def test_a_seed_gives_the_text_of_plain_decoding_by_sample(accept: str, seed: int) -> None:
    model = random_model(num_hidden_layers=3)
    params = SamplingParams(1.1, top_k=30, accept=accept)  # type: ignore[arg-type]
    decoder = decoder_with(model, truncated(model, 1), BeamShape(2, 4), params)
    emitted, again = (run(decoder, 60, seed)[0] for _ in "ab")
    plain, _, _ = run(Decoder(decoder.target, None, PLAIN, params), 60, seed)
    assert emitted == again
    assert (emitted == plain) == (accept == "sample")


@pytest.mark.parametrize(
    "shapes",
    [
        (BeamShape(3, 4),),
        (BeamShape(1, 4),),
        (BeamShape(1, 2), PLAIN, PLAIN, BeamShape(3, 5), PLAIN),
        (PLAIN, PLAIN, PLAIN, PLAIN, PLAIN, PLAIN, BeamShape(2, 2)),
    ],
    ids=len,
)
def test_the_draft_cache_after_any_step_equals_a_fresh_prefill(
    shapes: tuple[BeamShape, ...],
) -> None:
    model = random_model(num_hidden_layers=3)
    small = truncated(model, 2)
    decoder = decoder_with(model, small, PLAIN)
    for n in (8, 25, 40):
        remembers_the_text(decoder, model, small, n, shapes)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_calls_the_draft_model_once_for_each_drafted_token(shape: BeamShape) -> None:
    model = random_model()
    decoder = decoder_with(model, model, shape)
    with decoding.counted(decoder.drafter.model, "call", "hidden") as calls:  # type: ignore[attr-defined]
        _, results, _ = run(decoder, 40)
    drafts = len(results) + 1  # after the prompt, after each step, and one not submitted
    assert calls[0] == len(PROMPT) - 1
    assert len(calls) == 1 + drafts * (shape.length - 1)


def test_what_was_missed_is_read_in_one_call() -> None:
    model = random_model()
    decoder = decoder_with(model, model, PLAIN)
    with decoding.counted(decoder.drafter.model, "call", "hidden") as calls:  # type: ignore[attr-defined]
        emitted, _, _ = run(decoder, 20, shapes=Alternating(*[PLAIN] * 9, BeamShape(1, 2)))
    assert emitted == plain_tokens(model, PROMPT, 20)
    assert calls[:3] == [len(PROMPT) - 1, 8, 2]


def test_the_loop_reads_once_a_step_on_the_host() -> None:
    model = random_model()
    decoder = decoder_with(model, truncated(model, 1), BeamShape(3, 4))
    with counted_reads() as counts:
        _, results, _ = run(decoder, 40)
    assert counts == {"tolist": len(results), "eval": len(results) - 1}


def test_a_session_reads_its_text_once() -> None:
    model = byte_model()
    small = DraftModel(truncated(model, 1), byte_tokenizer())
    redrafter = Redrafter(model, byte_tokenizer(), small)
    assert isinstance(redrafter.drafter, DraftModel)
    session, alone = redrafter.session(), Redrafter(model, byte_tokenizer()).session()
    options = {"max_tokens": 12, "beam_width": 2, "beam_length": 3}
    read = []
    with decoding.counted(redrafter.drafter.model, "call", "hidden") as calls:
        for turn in ("one", "two and more", "three"):
            before = len(calls)
            emitted = "".join(r.text for r in session.stream(turn, **options))
            assert "".join(r.text for r in alone.stream(turn, max_tokens=12)) == emitted
            read.append(max(calls[before:]))
            redrafter.generate("something else", **options)  # type: ignore[arg-type]
    whole = len(redrafter.encode(session.messages))
    assert sum(read) < whole, "each turn was read once"


def test_an_idle_draft_model_reads_nothing_until_it_drafts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not at the end of an answer either; then it reads what it missed, in pieces."""
    monkeypatch.setattr(sequence_cache, "MAX_JOINED", 16)
    model = byte_model()
    redrafter = Redrafter(
        model, byte_tokenizer(), DraftModel(truncated(model, 1), byte_tokenizer())
    )
    read: list[tuple[int, int | None]] = []
    drafter = redrafter.drafter
    assert drafter is not None
    extend = drafter.extend

    def recorded(memory: Memory, seen: Seen) -> Memory:
        read.append((seen.tokens.shape[1] - 1, seen.start))
        return extend(memory, seen)

    monkeypatch.setattr(drafter, "extend", recorded)
    prompt, options = list(range(1, 61)), {"max_tokens": 20}
    for shape in (1, 1, 3):
        answer = redrafter.generate(prompt, beam_width=1, beam_length=shape, **options)
        if shape == 1:
            assert read == []
            prompt += answer.token_ids
    assert [size for size, start in read if start is not None][:6] == [16] * 6
    assert answer.token_ids == redrafter.generate(prompt, draft=False, **options).token_ids


@pytest.mark.parametrize("recurrent", [False, True])
def test_memory_of_an_abandoned_text_is_not_taken_for_that_of_another(recurrent: bool) -> None:
    """A long text; another one after half of it, without drafts; then its continuation."""
    model = random_model(num_hidden_layers=3)
    small = hybrid_model("qwen3_5") if recurrent else truncated(model, 2)
    target = Target(model)
    drafter, kept = drafter_for(target, small), PrefixCache(10**9)
    first = [(5 * i + 1) % VOCAB for i in range(40)]
    second = first[:20] + [(3 * i + 2) % VOCAB for i in range(30)]
    for prompt, shape in (
        (first, BeamShape(1, 3)),
        (second[:-5], PLAIN),
        (second, BeamShape(1, 3)),
    ):
        decoder = Decoder(target, drafter, shape, GREEDY)
        cache, start = kept.take(prompt, drafter) or (decoder.new_cache(), 0)
        for _ in decode(decoder, cache, start, prompt, sequence_keys(0), lambda _: True):
            pass
        kept.keep(cache, prompt, drafter)
    fresh = Target(small).new_cache()
    Target(small).append(mx.array([second]), fresh, 0)
    for held, layer in zip(cache.memory, fresh.layers, strict=True):
        for got, want in zip(held, layer.shared(len(second)), strict=False):
            if not isinstance(layer, StateCache):
                got = got[:, :, : len(second)]
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_text_that_shares_little_with_a_long_one_takes_no_more_memory_than_alone() -> None:
    target = Target(random_model())
    drafter, kept = drafter_for(target, truncated(target.model, 2)), PrefixCache(10**9)
    decoder, short = Decoder(target, drafter, BeamShape(1, 3), GREEDY), [1, 2, 3, 4]
    sizes = []
    for prompt in (short, [1, 2, *range(90)] * 20, [1, 2, 7, 8]):
        cache, start = kept.take(prompt, drafter) or (decoder.new_cache(), 0)
        for _ in decode(decoder, cache, start, prompt, sequence_keys(0), lambda _: True):
            pass
        before = kept.nbytes
        kept.keep(cache, prompt, drafter)
        sizes.append((cache.nbytes, kept.nbytes - before))
    assert sizes[0] == sizes[2]
    assert sizes[0][0] < sizes[1][0] / 20


@frees_at_once
def test_buffers_of_the_draft_model_are_written_in_place() -> None:
    """Both caches are in memory only once while decoding; a copied buffer would be there twice."""
    model = random_model(num_attention_heads=2, num_key_value_heads=2, head_dim=64)
    target = Target(model)
    drafter = drafter_for(target, random_model(
        seed=4, num_attention_heads=2, num_key_value_heads=2, head_dim=64, num_hidden_layers=6
    ))  # fmt: skip
    prompt = [i % VOCAB for i in range(3_000)]
    decoder = Decoder(target, drafter, BeamShape(2, 4), GREEDY)
    cache = decoder.new_cache()
    peak = peak_of_decoding(decoder, cache, prompt, 12)
    held = cache.target.nbytes + sum(a.nbytes for pair in cache.memory for a in pair)
    assert peak < 1.2 * held


def test_a_larger_vocabulary_is_cut_to_the_common_tokens() -> None:
    for own, theirs in ((VOCAB + 31, VOCAB), (VOCAB, VOCAB + 31)):
        model = random_model(vocab_size=theirs)
        target = Target(model)
        drafter = DraftModel(random_model(vocab_size=own), Words(own)).bind(  # type: ignore[arg-type]
            target,
            Words(theirs),  # type: ignore[arg-type]
        )
        emitted, _, _ = run(Decoder(target, drafter, BeamShape(2, 3), GREEDY), 30)
        assert emitted == plain_tokens(model, PROMPT, 30)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("own", [FEW - 2, FEW + 3])
def test_rejection_keeps_the_distribution_where_vocabularies_differ(own: int) -> None:
    """A token that only the target has is emitted too, and one that only the drafter has never."""
    _, target = tiny_target()
    model = random_model(seed=2, vocab_size=own, num_hidden_layers=1)
    drafter = DraftModel(model, Words(own)).bind(target, Words(FEW))  # type: ignore[arg-type]
    params = SamplingParams(1.0, accept="rejection")
    assert fits(BeamShape(2, 3), params, batches=2, drafter=drafter)


def test_another_tokenizer_is_refused_with_its_first_difference() -> None:
    with pytest.raises(MismatchError, match=r"token 4 is 'x'.*'t4'"):
        check_same_tokens(Words(9, x=4), Words(9), 9, "small")  # type: ignore[arg-type]
    check_same_tokens(Words(9), Words(12), 9, "small")  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_mlx_lms_own_draft_model_accepts_no_more(layers: int) -> None:
    """One beam drafts the same tokens as mlx-lm, step by step."""
    model = random_model(vocab_size=12, num_hidden_layers=3)
    small = truncated(model, layers)
    decoder = decoder_with(model, small, BeamShape(1, 4))
    emitted, results, _ = run(decoder, 61)
    prompt = mx.array([*PROMPT, emitted[0]])
    theirs = list(
        speculative_generate_step(prompt, model, small, num_draft_tokens=3, max_tokens=60)
    )
    plain = plain_tokens(model, PROMPT, 61)
    assert emitted == plain
    assert [int(token) for token, _, _ in theirs] == plain[1:]
    steps = sum(not from_draft for _, _, from_draft in theirs) + theirs[-1][2]
    assert len(results) - 1 <= steps
