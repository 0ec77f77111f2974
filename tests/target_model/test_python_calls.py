"""Number of Python calls that the target takes on the host: what a step waits for on a fast GPU."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import mlx.core as mx
import pytest
from simulated import AnswerPolicy, Text, cliff, decode, machine
from tiny import byte_model, byte_tokenizer, random_drafter, random_model

from redrafter_mlx.config import PLAIN, BeamShape, GenerationOptions
from redrafter_mlx.drafting.untrained.ngram import Lookup, NgramIndex
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.speculation.tree import TokenTree
from redrafter_mlx.target_model import model as target_model
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.profile import random_tree

OURS = str(Path(target_model.__file__).parents[1])

ANY_LAYER = 7 + 2 + 1 + 2 + 1
"""What a layer calls that is ours: seven linear layers, two rotary embeddings, the cache and, on a
CPU, attention and SwiGLU. The cache keeps drafts finite in one more call."""


def calls_of(function: Callable[[], object]) -> int:
    """Count the calls of this package's functions."""
    count = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OURS)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def verification_calls(layers: int, tree: TokenTree, *, compiled: bool, times: int = 3) -> int:
    """Count the calls of a verification like those before it, whose tree it moves to its slots."""
    target = Target(random_model(num_hidden_layers=layers))
    cache, length = target.new_cache(), mx.array([3])
    target.append(mx.array([[1, 2, 3]]), cache, 0)

    def step() -> None:
        target.verify(tree, cache, length, 3, compiled)
        cache.commit(tree, mx.zeros((1, 2), mx.int32), mx.array([0]), length)
        mx.eval(cache.buffers)

    for _ in range(times):
        step()
    return calls_of(step)


def engine_calls(layers: int, shape: BeamShape) -> float:
    """Count the calls of a step of a whole engine, where the text and its capacity are known."""
    calls = Counter[str]()
    counted = "begin"

    def profile(frame: FrameType, event: str, _: object) -> None:
        calls[counted] += event == "call" and frame.f_code.co_filename.startswith(OURS)

    threading.setprofile(profile)
    try:
        redrafter = Redrafter(
            byte_model(seed=1, num_hidden_layers=layers),
            byte_tokenizer(),
            random_drafter(vocab_size=258),
        )
        bias = ((256, -1e9), (257, -1e9))  # no answer ends before
        steps = dict[str, int]()
        for counted, tokens in (("once", 40), ("short", 20), ("long", 40)):
            options = GenerationOptions(max_tokens=tokens, logit_bias=bias, draft=shape != PLAIN)
            if shape != PLAIN:
                options = replace(options, beam_width=shape.width, beam_length=shape.length)
            answer = redrafter.generate([72, 101, 108], options=options)
            steps[counted] = answer.steps
    finally:
        threading.setprofile(None)
    return (calls["long"] - calls["short"]) / (steps["long"] - steps["short"])


@pytest.mark.parametrize("shape", [PLAIN, BeamShape(1, 2), BeamShape(2, 4)])
def test_a_compiled_call_takes_as_many_calls_with_any_number_of_layers(shape: BeamShape) -> None:
    tree = random_tree(shape.nodes, 97)
    few, many = (verification_calls(layers, tree, compiled=True) for layers in (2, 9))
    assert few == many < 40


@pytest.mark.parametrize("shape", [PLAIN, BeamShape(1, 2), BeamShape(2, 4)])
def test_a_layer_of_another_call_takes_what_the_model_asks_and_little_more(
    shape: BeamShape,
) -> None:
    tree = random_tree(shape.nodes, 97)
    few, many = (verification_calls(n, tree, compiled=False, times=1) for n in (2, 9))
    assert (many - few) / 7 <= ANY_LAYER


@pytest.mark.parametrize("shape", [PLAIN, BeamShape(3, 4)])
def test_a_step_of_the_engine_takes_as_many_calls_with_any_number_of_layers(
    shape: BeamShape,
) -> None:
    """Those of an answer's steps: what a longer answer takes beyond a shorter one."""
    few, many = (engine_calls(layers, shape) for layers in (2, 9))
    assert few == pytest.approx(many, abs=4)  # a prompt's chunk may be timed, or not
    assert few < 250


def test_reading_a_prompt_takes_what_the_model_asks_of_each_layer() -> None:
    def calls(layers: int) -> int:
        target = Target(random_model(num_hidden_layers=layers))
        cache = target.new_cache()
        return calls_of(lambda: target.append(mx.array([[1, 2, 3]]), cache, 0))

    assert (calls(9) - calls(2)) / 7 <= ANY_LAYER


def test_choosing_what_to_verify_takes_few_calls() -> None:
    """Costs are not computed anew in each step, nor shapes built that are only weighed."""
    costs, text = machine(cliff(8)), Text(0.8, 1)
    policy, steps = AnswerPolicy(costs), 100
    decode(policy, costs, [text] * 200)
    assert calls_of(lambda: decode(policy, costs, [text] * steps)) < 36 * steps
    index = NgramIndex(Lookup(), [*range(40)] * 3)
    drafted = policy.propose(128)
    assert policy.revise(index, drafted, drawn=False) is not None
    assert calls_of(lambda: policy.revise(index, drafted, drawn=False)) < 120
