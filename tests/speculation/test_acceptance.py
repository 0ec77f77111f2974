"""Acceptance methods and penalties, each against a slow reference or mlx-lm's own loop."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from beams import pack, random_beams
from decoding import SHAPES, counted_reads, run
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors
from tiny import byte_model, byte_tokenizer, random_drafter, random_model

from redrafter_mlx.config import BeamShape, GenerationOptions, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.speculation.accept import accept_typical
from redrafter_mlx.speculation.sampling import (
    Past,
    first_window,
    path_counts,
    path_windows,
    penalised,
    sequence_keys,
)
from redrafter_mlx.target_model.model import Target


def typical_walk(
    tokens: list[int],
    parents: list[int],
    valid: list[bool],
    probs: np.ndarray,
    epsilon: float,
    delta: float,
) -> list[int]:
    """Return the longest path of typical drafts; of several, the first in tree order."""
    paths = {0: [0]}
    for i in range(1, len(tokens)):
        parent = parents[i]
        if valid[i] and parent in paths:
            p = probs[parent]
            entropy = -sum(x * math.log(x) for x in p if x > 0)
            if p[tokens[i]] > min(epsilon, delta * math.exp(-entropy)):
                paths[i] = [*paths[parent], i]
    return max(paths.values(), key=len)


@pytest.mark.parametrize("seed", range(60))
def test_typical_acceptance_equals_a_walk_over_all_paths(seed: int) -> None:
    rng = random.Random(seed)
    numbers = np.random.default_rng(seed)
    B, W, L = rng.randrange(1, 4), rng.randrange(1, 5), rng.randrange(1, 6)
    tokens, scores = random_beams(rng, B, W, L, vocab=4)
    tree = pack(tokens, scores, W * L)
    N = tree.tokens.shape[1]
    probs = numbers.dirichlet([0.5] * 4, size=(B, N)).astype(np.float32)
    choices = numbers.integers(0, 4, size=(B, N))
    epsilon, delta = rng.choice([(0.3, 0.09), (0.2, 0.9), (0.05, 0.5)])
    got = accept_typical(tree, mx.log(mx.array(probs)), mx.array(choices), epsilon, delta)
    for b in range(B):
        path = typical_walk(
            tree.tokens[b].tolist(), tree.parents[b].tolist(), tree.valid[b].tolist(),
            probs[b], epsilon, delta,
        )  # fmt: skip
        n = got.n_accepted[b].item()
        assert n + 1 == len(path)
        assert got.path[b].tolist()[: n + 1] == path
        drafts = [tree.tokens[b, i].item() for i in path[1:]]
        assert got.emitted[b].tolist()[: n + 1] == [*drafts, choices[b, path[-1]]]


def test_windows_end_with_each_nodes_own_path() -> None:
    """The drawing in `path_windows`, with a second child."""
    a, b, c, r, x, y = range(10, 16)
    tree = pack([[[r, x], [r, y]]], [[[0.0, -1.0], [0.0, -2.0]]], 3)
    got = path_windows(mx.array([[a, b, c]]), tree)
    assert got.tolist() == [[[b, c, r], [c, r, x], [c, r, y]]]


def test_counts_are_of_each_nodes_own_path() -> None:
    """Root 1, then 1 or 2, after two tokens 0: each node counts those and its own path."""
    tree = pack([[[1, 1], [1, 2]]], [[[0.0, -1.0], [0.0, -2.0]]], 3)
    got = path_counts(mx.array([[2, 0, 0]]), tree)
    assert got.tolist() == [[[2, 1, 0], [2, 2, 0], [2, 1, 1]]]


@pytest.mark.parametrize("n", [1, 3, 5, 8])
def test_a_short_history_is_filled_by_what_it_holds(n: int) -> None:
    tokens = list(range(n))
    assert first_window(tokens, 5)[-min(n, 5) :] == tokens[-5:]
    assert set(first_window(tokens, 5)) == set(tokens[-5:])
    assert len(first_window(tokens, 5)) == 5


PENALTIES = [
    {"repetition_penalty": 1.3, "repetition_context": 4},
    {"repetition_penalty": 1.1},
    {"logit_bias": ((5, 4.0), (7, -3.0))},
    {"repetition_penalty": 1.5, "repetition_context": 7, "logit_bias": ((5, 2.0),)},
    {"frequency_penalty": 0.6},
    {"presence_penalty": 2.0},
    {"presence_penalty": -0.5, "frequency_penalty": 1.1, "repetition_penalty": 1.2},
]


def openai_penalties(
    prompt: list[int], params: SamplingParams
) -> Callable[[mx.array, mx.array], mx.array]:
    """A logits processor for mlx-lm's loop that counts all emitted tokens again for each token."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        counts = Counter(tokens.tolist()[len(prompt) :])  # type: ignore[arg-type]
        taken = np.zeros(logits.shape, np.float32)
        for token, count in counts.items():
            taken[0, token] = params.frequency_penalty * count + params.presence_penalty
        return logits - mx.array(taken)

    return process


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("prompt", [[3], [i % 90 for i in range(40)]])
def test_penalised_tokens_equal_mlx_lms_own_loop(penalty: dict, prompt: list[int]) -> None:
    """Greedy decoding, several shapes, an oracle drafter: each node needs its own history."""
    model = random_model(seed=3)
    target = Target(model)
    params = SamplingParams(**penalty)
    processors = make_logits_processors(
        logit_bias=dict(params.logit_bias) or None,
        repetition_penalty=penalty.get("repetition_penalty"),
        repetition_context_size=params.repetition_context,
    )
    processors.append(openai_penalties(prompt, params))
    steps = generate_step(mx.array(prompt), model, max_tokens=50, logits_processors=processors)
    want = [int(token) for token, _ in steps]
    for shape in (SHAPES[0], SHAPES[4], SHAPES[5], SHAPES[7]):
        oracle = Oracle(prompt + want, 97)
        got, results = run(Decoder(target, oracle, shape, params), prompt, 40)
        assert got == want[:40], shape
        assert shape.length == 1 or max(len(r.tokens) for r in results) > 1


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_penalties_and_biases_of_16_bit_logits_neither_vanish_nor_erase_the_order(
    dtype: mx.Dtype,
) -> None:
    logits, once = mx.array([[[34.0, 33.75]]], dtype), Past(None, mx.array([[[1, 0]]]))
    for penalty in ({"presence_penalty": 0.1}, {"frequency_penalty": 0.1}):
        first, second = penalised(logits, once, SamplingParams(**penalty))[0, 0].tolist()
        assert (first, second) == (pytest.approx(33.9), 33.75)
    both = SamplingParams(logit_bias=((0, 100.0), (1, 100.0)))
    assert penalised(logits, None, both)[0, 0].tolist() == [134.0, 133.75]
    assert penalised(logits, None, SamplingParams()).dtype == dtype, "nothing to compute"


@pytest.mark.parametrize("accept", ["rejection", "typical", "sample"])
def test_no_method_adds_a_host_read_to_the_step(accept: str) -> None:
    target = Target(random_model())
    params = SamplingParams(
        0.8,
        top_p=0.9,
        accept=accept,
        repetition_penalty=1.2,
        frequency_penalty=0.4,  # type: ignore
    )
    decoder = Decoder(target, random_drafter().bind(target), BeamShape(3, 4), params)
    state, _ = decoder.start(decoder.new_cache(), 0, [[1, 2, 3]], sequence_keys(0))
    with counted_reads() as counts:
        for i in range(5):
            state, _ = decoder.step(state, 3 + i * 4)
    assert counts == {}


@pytest.mark.parametrize("accept", ["rejection", "typical", "sample"])
def test_a_seed_makes_a_run_repeatable(accept: str) -> None:
    target = Target(random_model())
    params = SamplingParams(0.9, accept=accept)  # type: ignore[arg-type]
    decoder = Decoder(target, random_drafter().bind(target), BeamShape(3, 4), params)
    first, _ = run(decoder, [3, 5], 40, seed=1)
    mx.random.seed(99)
    assert run(decoder, [3, 5], 40, seed=1)[0] == first
    assert run(decoder, [3, 5], 40, seed=2)[0] != first


def test_rejection_accepts_more_of_a_hot_targets_tokens_than_sampling() -> None:
    """The purpose of rejection: if no token is likely, sampling seldom draws the drafted one."""
    target = Target(random_model(vocab_size=8, num_hidden_layers=1))
    bound = random_drafter(vocab_size=8).bind(target)
    counts = {}
    for accept in ("sample", "rejection"):
        params = SamplingParams(1.5, accept=accept)  # type: ignore[arg-type]
        _, results = run(Decoder(target, bound, BeamShape(1, 3), params), [3, 5], 400)
        counts[accept] = len(results)
    assert counts["rejection"] < counts["sample"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accept": "greedy", "temperature": 0.7}, "accept is 'greedy'.*temperature is 0.7"),
        ({"accept": "sample"}, "accept is 'sample'.*temperature is 0"),
        ({"accept": "rejection"}, "accept is 'rejection'.*temperature is 0"),
        ({"accept": "typical"}, "accept is 'typical'.*temperature is 0"),
        ({"accept": "typicle", "temperature": 1}, "accept is 'typicle'.*greedy"),
        ({"epsilon": 0}, "epsilon is 0"),
        ({"delta": 1.5}, "delta is 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty is 1e-38"),
        ({"repetition_context": 0}, "repetition_context is 0"),
        ({"frequency_penalty": 2.5}, "frequency_penalty is 2.5"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan"),
        ({"logit_bias": {5: float("inf")}}, "logit_bias is inf"),
        ({"logit_bias": {5: 1e308}}, "logit_bias is 1e\\+308.*1e\\+30"),
        ({"logit_bias": {5: -1e39}}, "logit_bias is -1e\\+39.*-1e\\+30"),
        ({"logit_bias": {-5: 1.0}}, "logit_bias token is -5"),
        ({"logit_bias": {5000: 1.0}}, "5000.*258"),
    ],
)
def test_parameters_that_contradict_are_refused_naming_the_value(
    options: dict, message: str
) -> None:
    redrafter = Redrafter(byte_model(), byte_tokenizer())
    with pytest.raises(BadInputError, match=message):
        redrafter.stream([1, 2], **options)


def test_the_method_follows_the_temperature_unless_it_is_given() -> None:
    assert GenerationOptions().method == "greedy"
    assert GenerationOptions(temperature=0.5).method == "sample"
    assert GenerationOptions(temperature=0.5, accept="rejection").lossless
    assert not GenerationOptions(temperature=0.5, accept="typical").lossless
