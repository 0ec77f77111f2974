"""An answer: equal to mlx-lm's, counted, cut where it ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from engines import PROMPT, Build, make
from mlx_lm.generate import stream_generate as mlx_lm_stream
from tiny import byte_model, byte_tokenizer, random_drafter

import redrafter_mlx
from redrafter_mlx.config import AcceptMethod, GenerationOptions
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions


def test_options_know_their_sampling_parameters() -> None:
    options = GenerationOptions(temperature=0.5, top_k=3, max_tokens=9, seed=1)
    assert options.sampling.temperature == 0.5
    assert options.sampling == GenerationOptions(temperature=0.5, top_k=3, seed=2).sampling


def oracle_for(model: nn.Module, prompt: list[int], n: int) -> Oracle:
    plain = make(model, None).generate(prompt, max_tokens=n)
    return Oracle(prompt + plain.token_ids, 258)


def test_an_answer_equals_mlx_lms_stream_generate(model: nn.Module, redrafter: Redrafter) -> None:
    """Token, text, counts and finish reason, response by response."""
    theirs = list(mlx_lm_stream(model, byte_tokenizer(), PROMPT, max_tokens=40))
    ours = list(redrafter.stream(PROMPT, max_tokens=40, logprobs=True))
    assert [r.token for r in ours] == [r.token for r in theirs]
    assert "".join(r.text for r in ours) == "".join(r.text for r in theirs)
    for got, want in zip(ours, theirs, strict=True):
        assert got.finish_reason == want.finish_reason
        assert got.generation_tokens == want.generation_tokens
        assert got.prompt_tokens == want.prompt_tokens
        np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=1e-3, atol=1e-4)


def held_by_responses(redrafter: Redrafter, n: int, **options: object) -> int:
    """Return the bytes of arrays held by the responses of an answer of `n` tokens."""
    responses = list(redrafter.stream(PROMPT, max_tokens=n, **options))  # type: ignore[arg-type]
    assert len(responses) == n

    def release() -> int:
        mx.synchronize()
        held = mx.get_active_memory()
        responses.clear()
        return held - mx.get_active_memory()

    # In the thread of the engine, which has let go of the answer and measures no costs meanwhile.
    return redrafter.thread.run(release)


def test_memory_is_flat_in_the_number_of_tokens(redrafter: Redrafter) -> None:
    shape = {"beam_width": 2, "beam_length": 4}
    assert redrafter.generate(PROMPT, max_tokens=200).token_ids[199] >= 0  # compiles and warms up
    short, long = (held_by_responses(redrafter, n, **shape) for n in (20, 200))
    assert long - short < 180 * 4, "less than a number a token"


def test_a_response_holds_one_row_of_log_probabilities_where_asked(redrafter: Redrafter) -> None:
    assert all(r.logprobs is None for r in redrafter.stream(PROMPT, max_tokens=5))
    row = 4 * 258
    for shape in ({"draft": False}, {"beam_width": 2, "beam_length": 4}):
        short, long = (held_by_responses(redrafter, n, logprobs=True, **shape) for n in (20, 200))
        # MLX may take a freed buffer of up to twice the size; the logits of a tree are seven rows.
        # What the two answers hold besides may differ by less than a number a token.
        assert 180 * (row - 4) <= long - short <= 2 * 180 * row


def test_statistics_count_steps_and_tokens(model: nn.Module) -> None:
    drafted = Redrafter(model, byte_tokenizer(), oracle_for(model, PROMPT, 80))
    responses = list(drafted.stream(PROMPT, max_tokens=60, beam_width=2, beam_length=4))
    last = responses[-1]
    assert last.steps < 59, "an oracle saves steps"
    assert last.tokens_per_step == pytest.approx(59 / last.steps)
    assert sum(r.source == "model" for r in responses) in (last.steps, last.steps + 1)
    plain = drafted.generate(PROMPT, max_tokens=60, draft=False)
    assert (plain.steps, plain.tokens_per_step) == (59, 1.0)
    assert plain.token_ids == [r.token for r in responses]


def test_the_usual_shape_comes_with_the_nodes_that_its_steps_verified(model: nn.Module) -> None:
    """Counted in the trees: prompt lookup often finds fewer drafts than a shape has room for."""
    responses = list(
        Redrafter(model, byte_tokenizer(), host_drafters=(Lookup(),)).stream(
            [1, 2, 3] * 4, max_tokens=80
        )
    )
    last = responses[-1]
    assert last.usual_shape is not None
    steps = {r.steps: r.step for r in responses if r.steps}.values()
    mine = [step.nodes for step in steps if step.shape == last.usual_shape]
    assert last.usual_nodes == pytest.approx(sum(mine) / len(mine))


@pytest.mark.parametrize("accept", ["sample", "rejection", "typical"])
@pytest.mark.parametrize("seed", [None, 1])
def test_a_shape_that_the_options_do_not_name_is_reported_however_drafts_are_accepted(
    model: nn.Module, accept: AcceptMethod, seed: int | None
) -> None:
    redrafter = Redrafter(model, byte_tokenizer(), random_drafter(seed=1, vocab_size=258))
    bias = ((256, -1e9),)  # an answer that ends with its first token takes no step
    options = GenerationOptions(
        max_tokens=20, temperature=1.0, accept=accept, seed=seed, logit_bias=bias
    )
    *_, last = redrafter.stream([1, 2, 3] * 4, options=options)
    assert last.usual_shape is not None
    *_, last = redrafter.stream([1, 2, 3] * 4, options=options, beam_width=2, beam_length=3)
    assert last.usual_shape is None


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_cuts_exactly_where_autoregression_would(
    model: nn.Module, max_tokens: int
) -> None:
    drafted = Redrafter(model, byte_tokenizer(), oracle_for(model, PROMPT, 40))
    got = drafted.generate(PROMPT, max_tokens=max_tokens, beam_width=3, beam_length=4)
    want = drafted.generate(PROMPT, max_tokens=max_tokens, draft=False)
    assert (got.token_ids, got.text, got.finish_reason) == (
        want.token_ids,
        want.text,
        want.finish_reason,
    )
    assert len(got.token_ids) == max_tokens


def test_end_of_text_inside_an_accepted_draft_ends_the_answer_there(
    model: nn.Module, build: Build
) -> None:
    text = build(None).generate(PROMPT, max_tokens=60).token_ids
    for position in (1, 2, 3, 5, 8, 13):
        drafted = Redrafter(model, byte_tokenizer(), Oracle(PROMPT + text, 258))
        drafted.tokenizer.eos_token_ids = {text[position]}
        first = text.index(text[position])
        got = drafted.generate(PROMPT, max_tokens=60, beam_width=3, beam_length=5)
        assert (got.token_ids, got.finish_reason) == (text[: first + 1], "stop")


def test_stop_strings_that_span_tokens_and_drafts_cut_as_without_drafts(model: nn.Module) -> None:
    oracle = oracle_for(model, PROMPT, 80)
    drafted = Redrafter(model, byte_tokenizer(), oracle)
    text = drafted.generate(PROMPT, max_tokens=60, draft=False).text
    for at, n in itertools.product((2, 5, 11, 20), (1, 2, 5)):
        stop = text[at : at + n]
        got = drafted.generate(PROMPT, max_tokens=60, stop=[stop], beam_width=2, beam_length=5)
        plain = drafted.generate(PROMPT, max_tokens=60, stop=[stop], draft=False)
        assert got.text == plain.text == text[: text.index(stop)]
        assert got.token_ids == plain.token_ids
        assert got.finish_reason == "stop"


def test_a_prompt_can_be_text_messages_or_ids(redrafter: Redrafter) -> None:
    asked = redrafter.encode("hé")
    assert asked == redrafter.encode([{"role": "user", "content": "hé"}])
    assert redrafter.encode(asked) == asked
    assert redrafter.tokenizer.decode(asked) == (
        "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    )
    assert redrafter.tokenizer.decode(redrafter.encode("hé", raw=True)) == "hé"


@pytest.mark.parametrize("array", [np.array, mx.array])
def test_prompts_and_options_may_be_arrays(redrafter: Redrafter, array: Callable) -> None:
    """As other libraries give them: scalars and arrays of NumPy's and MLX's."""
    numbers = {
        "max_tokens": 12, "seed": 3, "temperature": 0.75, "top_p": 0.5, "top_k": 20,
        "beam_width": 2, "beam_length": 3,
    }  # fmt: skip
    given = {name: array(value) for name, value in numbers.items()}
    given |= {"draft": array(True), "logit_bias": {7: array(2.5)}}
    numbers |= {"draft": True, "logit_bias": {7: 2.5}}
    want = redrafter.generate(PROMPT, **numbers).token_ids
    for prompt in (array(PROMPT), array([PROMPT]), [array(token) for token in PROMPT]):
        assert redrafter.generate(prompt, **given).token_ids == want
        assert [r.token for r in redrafter.stream(prompt, **given)] == want
        assert redrafter.encode(prompt) == PROMPT
    answers: list[list[int]] = [[], []]
    for i, response in redrafter.batch(array([PROMPT, PROMPT]), **given):
        answers[i].append(response.token)
    assert answers == [want, want]
    pair = redrafter.model, redrafter.tokenizer
    ours = redrafter_mlx.stream_generate(*pair, array(PROMPT), options=GenerationOptions(**given))
    assert [r.token for r in ours] == want
    answer = [r.token for r in redrafter.session().stream("Hi", **given)]
    assert answer == [r.token for r in redrafter.session().stream("Hi", **numbers)]
    assert EngineOptions(max_batch=array(2)) == EngineOptions(max_batch=2)


@pytest.mark.parametrize("scalar", [np.float32, np.float64, np.float16])
def test_a_float_of_any_size_is_a_number(scalar: Callable) -> None:
    options = GenerationOptions(
        temperature=scalar(0.5), seed=np.uint64(2**63), max_tokens=np.int8(9)
    )
    assert options == GenerationOptions(temperature=0.5, seed=2**63, max_tokens=9)
    assert [type(getattr(options, n)) for n in ("temperature", "seed")] == [float, int]


def test_warming_up_leaves_answers_as_they_are(redrafter: Redrafter) -> None:
    before = redrafter.generate(PROMPT, max_tokens=10)
    redrafter.warm_up()
    assert redrafter.generate(PROMPT, max_tokens=10).token_ids == before.token_ids


@pytest.mark.parametrize("thinking", [None, False, True])
def test_whether_to_think_reaches_the_chat_template_by_every_way_to_ask(
    redrafter: Redrafter, thinking: bool | None
) -> None:
    tokenizer, asked = redrafter.tokenizer, [{"role": "user", "content": "hi"}]
    tokenizer.chat_template += "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    given = {} if thinking is None else {"enable_thinking": thinking}
    want = tokenizer.apply_chat_template(asked, add_generation_prompt=True, **given)
    options = GenerationOptions(max_tokens=2, thinking=thinking)
    for prompt in ("hi", asked):
        *_, last = redrafter.stream(prompt, options=options)
        assert last.prompt_tokens == len(want)
        assert redrafter.generate(prompt, options=options).prompt_ids == want
    *_, last = redrafter.session().stream("hi", options=options)
    assert last.prompt_tokens == len(want)
    ((_, first), *_) = redrafter.batch(["hi"], options=options)
    assert first.prompt_tokens == len(want)


def test_whole_answers_have_their_log_probabilities_if_asked_for() -> None:
    redrafter = Redrafter(byte_model(), byte_tokenizer())
    answer = redrafter.generate([1, 2, 3], max_tokens=4, logprobs=True)
    assert answer.logprobs is not None
    assert [int(mx.argmax(p).item()) for p in answer.logprobs] == answer.token_ids
    assert redrafter.generate([1, 2, 3], max_tokens=4).logprobs is None
