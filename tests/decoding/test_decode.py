"""The decoding loop: exact for any drafts, lazy, one transfer per step, constant memory."""

from __future__ import annotations

import mlx.core as mx
import pytest
from decoding import READS, SHAPES, counted_reads, peak_of_decoding, run
from tiny import plain_tokens, random_drafter, random_model

from redrafter_mlx.bench.measure.packing import PACKINGS
from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding import pipeline
from redrafter_mlx.decoding.built_step import BuiltStep
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.state import DecodeState
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target_model.model import Target

GREEDY = SamplingParams()
FEW = 16
"""Size of a vocabulary that is small enough for a random drafter to be right sometimes."""


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "stablelm"])
def test_tokens_equal_autoregression_without_a_drafter(name: str) -> None:
    model = random_model(name)
    decoder = Decoder(Target(model), None, BeamShape(1, 1), GREEDY)
    emitted, results = run(decoder, [3, 5, 7], 50)
    assert emitted == plain_tokens(model, [3, 5, 7], 50)
    assert all(len(r.tokens) == r.nodes == r.query_rows == 1 for r in results)


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_equal_autoregression_with_a_random_drafter(shape: BeamShape) -> None:
    model = random_model()
    target = Target(model)
    decoder = Decoder(target, random_drafter().bind(target), shape, GREEDY)
    emitted, _ = run(decoder, [3, 5, 7], 60)
    assert emitted == plain_tokens(model, [3, 5, 7], 60)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.length > 1])
def test_tokens_equal_autoregression_whatever_length_is_accepted(shape: BeamShape) -> None:
    """The oracle drafter errs at random positions, so that every accepted length occurs."""
    model = random_model(seed=3)
    prompt = [3, 5, 7]
    text = prompt + plain_tokens(model, prompt, 240)
    decoder = Decoder(Target(model), Oracle(text, 97), shape, GREEDY)
    emitted, results = run(decoder, prompt, 200)
    assert emitted == text[3:203]
    assert {len(r.tokens) for r in results} == set(range(1, shape.length + 1))


@pytest.mark.parametrize("shape", [BeamShape(1, 5), BeamShape(3, 4)])
def test_tokens_equal_autoregression_while_the_cache_grows(shape: BeamShape) -> None:
    """Across two bucket boundaries, with a pending path."""
    model = random_model(seed=3)
    prompt = [i % 97 for i in range(200)]
    text = prompt + plain_tokens(model, prompt, 420)
    decoder = Decoder(Target(model), Oracle(text, 97), shape, GREEDY)
    emitted, _ = run(decoder, prompt, 400)
    assert emitted == text[200:600]


@pytest.mark.parametrize("max_nodes", [1, 2, 3, 5, 8])
def test_tokens_equal_autoregression_when_the_tree_is_cut_short(max_nodes: int) -> None:
    model = random_model(seed=3)
    text = [3, 5, 7, *plain_tokens(model, [3, 5, 7], 120)]
    shape = BeamShape(4, 4, max_nodes)
    decoder = Decoder(Target(model), Oracle(text, 97), shape, GREEDY)
    emitted, results = run(decoder, [3, 5, 7], 100)
    assert emitted == text[3:103]
    assert max(r.nodes for r in results) <= max_nodes


@pytest.mark.parametrize("shape", [BeamShape(1, 4), BeamShape(3, 4), BeamShape(4, 5, 9)])
def test_tokens_equal_autoregression_with_the_papers_packing(shape: BeamShape) -> None:
    """The paper's trees are at most as large as ours, some smaller; unmerged ones never are."""
    model = random_model(vocab_size=FEW)
    target = Target(model)
    drafter = random_drafter(seed=5, vocab_size=FEW).bind(target)
    want = plain_tokens(model, [3, 5, 7], 60)
    nodes = {}
    for prefixes, pack in PACKINGS.items():
        decoder = Decoder(target, drafter, shape, GREEDY, pack=pack)
        emitted, results = run(decoder, [3, 5, 7], 60)
        assert emitted == want
        assert max(len(r.tokens) for r in results) > 2
        nodes[prefixes] = [r.nodes for r in results[1:]]
    assert set(nodes["all"]) == {shape.nodes}
    assert set(nodes["separate"]) == {shape.width * (shape.length - 1) + 1}
    assert max(nodes["final"]) <= shape.nodes
    assert (min(nodes["final"]) < shape.nodes) == (shape == BeamShape(3, 4))


def test_the_counter_of_reads_counts_each_kind() -> None:
    """A test of the laziness test."""
    with counted_reads() as counts:
        x = mx.array(1)
        x.item(), x.tolist(), bool(x), int(x), float(x), x.__array__(), range(3)[x], mx.eval(x)
    assert {*READS, "eval"} <= set(counts)


def drafters(target: Target) -> list[Drafter | None]:
    tied = random_drafter(head="tied", exit_dim=32, draft_vocab_size=40)
    return [None, random_drafter().bind(target), tied.bind(target)]


@pytest.mark.parametrize("shape", [BeamShape(1, 1), BeamShape(1, 4), BeamShape(3, 4)])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.8, top_p=0.9, top_k=20, min_p=0.05)])
def test_a_step_reads_nothing_on_the_host(shape: BeamShape, sampling: SamplingParams) -> None:
    target = Target(random_model())
    for drafter in drafters(target):
        decoder = Decoder(target, drafter, shape, sampling)
        state, _ = decoder.start(decoder.new_cache(), 0, [[1, 2, 3]], sequence_keys(0))
        with counted_reads() as counts:
            for i in range(5):
                state, _ = decoder.step(state, 3 + i * shape.length)
        assert counts == {}


def test_the_loop_transfers_once_a_step() -> None:
    target = Target(random_model())
    decoder = Decoder(target, random_drafter().bind(target), BeamShape(3, 4), GREEDY)
    with counted_reads() as counts:
        _, results = run(decoder, [1, 2, 3], 40)
    assert counts == {"tolist": len(results)}


@pytest.fixture
def submissions(monkeypatch: pytest.MonkeyPatch) -> list[DecodeState]:
    """Return the list of steps submitted to the device, filled as they are submitted."""
    seen: list[DecodeState] = []
    honest = pipeline.submit_verification

    def counting(step: BuiltStep) -> None:
        seen.append(step.state)
        honest(step)

    monkeypatch.setattr(pipeline, "submit_verification", counting)
    return seen


def test_the_next_step_is_submitted_before_the_caller_is_given_this_one(
    submissions: list[DecodeState],
) -> None:
    target = Target(random_model())
    decoder = Decoder(target, None, BeamShape(1, 1), GREEDY)
    results = decode(decoder, decoder.new_cache(), 0, [1, 2], sequence_keys(0), lambda _: False)
    for given, _ in zip(range(1, 6), results, strict=False):
        assert len(submissions) == given + 1


def test_nothing_is_submitted_after_the_end(submissions: list[DecodeState]) -> None:
    decoder = Decoder(Target(random_model()), None, BeamShape(1, 1), GREEDY)
    decoder.target.submits_ahead = False
    _, results = run(decoder, [1, 2], 5)
    assert len(submissions) == len(results) == 5


def test_memory_stays_flat_over_six_hundred_steps() -> None:
    """The cache has its full size from the start, so any growth is a leak or a lasting copy."""
    model = random_model(num_hidden_layers=1)
    target = Target(model)
    decoder = Decoder(target, random_drafter().bind(target), BeamShape(2, 2), GREEDY)
    prompt = [i % 97 for i in range(300)]
    state, output = decoder.start(decoder.new_cache(), 0, [prompt], sequence_keys(0))
    sizes = []
    for step in range(600):
        # The length is reset, so that the position stays the same; otherwise it is a real step.
        state.length = mx.array([300])
        state.cache.target.pending = None
        state, output = decoder.step(state, 300)
        built = BuiltStep([], state, output)
        pipeline.submit_verification(built)
        pipeline.submit_drafting(built)
        output.read()
        if step % 50 == 49:
            sizes.append(mx.get_active_memory())
    assert max(sizes[1:]) <= sizes[0] * 1.02 + 2**16, sizes


def test_buffers_are_written_in_place() -> None:
    """The KV cache is in memory only once while decoding; a copied buffer would be there twice."""
    model = random_model(num_attention_heads=2, num_key_value_heads=2, head_dim=64)
    target = Target(model)
    prompt = [i % 97 for i in range(3_000)]
    for shape in (BeamShape(1, 1), BeamShape(2, 3)):
        decoder = Decoder(target, random_drafter().bind(target), shape, GREEDY)
        cache = decoder.new_cache()
        assert peak_of_decoding(decoder, cache, prompt, 12) < 1.4 * cache.target.nbytes
