"""What the engine refuses before an answer begins."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from engines import PROMPT, Build
from tiny import byte_model, byte_tokenizer, random_drafter

import redrafter_mlx
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.engine.prompts.prompt import prompt_tokens
from redrafter_mlx.errors import BadInputError, MismatchError
from redrafter_mlx.speculation.static_tree import StaticTree


def test_a_shape_that_a_static_tree_does_not_have_is_refused_at_once(build: Build) -> None:
    """Before a response is requested."""

    class AlongTree(Oracle):
        tree = StaticTree(((0,), (1,), (0, 0)))

    redrafter = build(AlongTree([1, 2], 258))
    for ask in (redrafter.stream, redrafter.astream, redrafter.session().stream):
        with pytest.raises(BadInputError, match="beam_width is 7"):
            ask("Hi", beam_width=7)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"max_batch": 0}, "max_batch is 0"),
        ({"prefix_bytes": -1}, "prefix_bytes is -1"),
        ({"memory_bytes": "8GB"}, "memory_bytes is '8GB'"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict, named: str) -> None:
    with pytest.raises(BadInputError, match=named):
        EngineOptions(**limits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"temperature": 1e39}, "temperature is 1e\\+39.*at most 1e\\+06"),
        ({"logit_bias": None}, "logit_bias is None"),
        ({"logit_bias": 5}, "logit_bias is 5"),
        ({"logit_bias": "ab"}, "logit_bias is 'ab'"),
        ({"logit_bias": [1, 2]}, "logit_bias is \\[1, 2\\]"),
        ({"logit_bias": [(1, 2, 3)]}, "logit_bias is"),
        ({"logit_bias": {"a": 1}}, "logit_bias token is 'a'"),
        ({"logit_bias": {1: "a"}}, "logit_bias is 'a'"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias is nan"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": 2}, "min_p is 2"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"beam_width": 0}, "beam_width is 0.*70"),
        ({"beam_length": 99}, "beam_length is 99"),
        ({"seed": -3}, "seed is -3"),
        ({"stop": [""]}, "stop is"),
        ({"stop": 5}, "stop is 5"),
        ({"draft": "no"}, "draft is 'no'"),
        ({"logprobs": 1}, "logprobs is 1"),
        ({"temprature": 1}, "unknown option 'temprature'; did you mean 'temperature'"),
    ],
)
def test_bad_options_are_refused_at_once_naming_the_value(
    redrafter: Redrafter, options: dict, message: str
) -> None:
    with pytest.raises(BadInputError, match=message.replace("(", r"\(")):
        redrafter.stream(PROMPT, **options)
    with pytest.raises(BadInputError):
        redrafter.session().stream("hi", **options)


def test_text_with_a_token_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"holds token \d+; the model has 50"):
        prompt_tokens(byte_tokenizer(), "xyz", raw=True, vocab_size=50)


@pytest.mark.parametrize(
    "prompt",
    [[], [258], [-1], [1.5], [True], "", None, 5, {"role": "user", "content": "hi"}, iter([1, 2]),
     mx.array([[1], [2]]), np.array([1.5]), np.array(1), mx.array([]), np.array([[True]]), b"hi",
     bytearray(b"hi"), memoryview(b"hi"), {1, 2}, [[1, 2]], ["hi"], "\ud800",
     [1, {"role": "user", "content": "hi"}]],
)  # fmt: skip
@pytest.mark.parametrize("raw", [False, True])
def test_bad_prompts_are_refused_at_once(redrafter: Redrafter, prompt: object, raw: bool) -> None:
    if isinstance(prompt, str) and not prompt and not raw:
        pytest.skip("an empty message is not an empty prompt: the template adds to it")
    with pytest.raises(BadInputError, match=r"prompt|message"):
        redrafter.stream(prompt, raw=raw)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user"}], [{"role": "user", "content": 5}], [{"role": "user", "content": "a"}, 5],
     [{}], [{"role": "user", "content": "a"}, "b"]],
)  # fmt: skip
def test_bad_messages_are_refused_at_once(redrafter: Redrafter, messages: object) -> None:
    with pytest.raises(BadInputError, match="message"):
        redrafter.stream(messages)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [None, 5, b"hi", ["hi"], {"role": "user", "content": "hi"}])
def test_a_turn_that_is_no_string_is_refused_at_once(redrafter: Redrafter, text: object) -> None:
    with pytest.raises(BadInputError, match="message"):
        redrafter.session().stream(text)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="message"):
        redrafter.session(system=5).stream("hi")  # type: ignore[arg-type]


def test_options_of_another_type_are_refused_at_once(redrafter: Redrafter) -> None:
    with pytest.raises(BadInputError, match="options"):
        redrafter.stream(PROMPT, options={"temperature": 1})  # type: ignore[arg-type]


def test_a_drafter_of_another_size_is_refused(model: nn.Module) -> None:
    with pytest.raises(MismatchError, match=r"97.*258"):
        Redrafter(model, byte_tokenizer(), random_drafter())


def test_objects_of_the_wrong_kind_are_refused_in_one_line() -> None:
    redrafter = Redrafter(byte_model(), byte_tokenizer())
    with pytest.raises(BadInputError, match="prompts is a string"):
        redrafter.batch("a prompt")
    with pytest.raises(BadInputError, match="repetition_context"):
        redrafter.generate([1], repetition_penalty=1.1, repetition_context=10**9)
    for drafter in (Oracle, 5):
        with pytest.raises(BadInputError, match="derives from Drafter"):
            Redrafter(byte_model(), byte_tokenizer(), drafter)  # type: ignore[arg-type]
        with pytest.raises(BadInputError, match="derives from Drafter"):
            redrafter_mlx.load(drafter=drafter)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="EngineOptions"):
        redrafter_mlx.load(engine={"max_batch": 4})  # type: ignore[arg-type]
