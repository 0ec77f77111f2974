"""The library's public interface: answers, sessions, threads, asyncio, and refusals."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import stream_generate as mlx_lm_stream
from mlx_lm.models.rope_utils import SuScaledRoPE
from tiny import byte_model, byte_tokenizer, random_drafter

import redrafter_mlx
from redrafter_mlx.config import AcceptMethod, GenerationOptions
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.engine.prompts.prompt import prompt_tokens
from redrafter_mlx.engine.session import Session
from redrafter_mlx.errors import BadInputError, EngineFailedError, MismatchError
from redrafter_mlx.response import Response

PROMPT = [72, 101, 108]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return byte_model(seed=1)


def make(model: nn.Module, drafted: bool = True) -> Redrafter:
    drafter = random_drafter(vocab_size=258) if drafted else None
    return Redrafter(model, byte_tokenizer(), drafter)


@pytest.fixture
def redrafter(model: nn.Module) -> Redrafter:
    return make(model)


def oracle_for(model: nn.Module, prompt: list[int], n: int) -> Oracle:
    plain = make(model, drafted=False).generate(prompt, max_tokens=n)
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
        assert 180 * row <= long - short <= 2 * 180 * row


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


def test_end_of_text_inside_an_accepted_draft_ends_the_answer_there(model: nn.Module) -> None:
    text = make(model, drafted=False).generate(PROMPT, max_tokens=60).token_ids
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
    turn = [r.token for r in redrafter.session().stream("Hi", **given)]
    assert turn == [r.token for r in redrafter.session().stream("Hi", **numbers)]
    assert EngineOptions(max_batch=array(2)) == EngineOptions(max_batch=2)


@pytest.mark.parametrize("scalar", [np.float32, np.float64, np.float16])
def test_a_float_of_any_size_is_a_number(scalar: Callable) -> None:
    options = GenerationOptions(
        temperature=scalar(0.5), seed=np.uint64(2**63), max_tokens=np.int8(9)
    )
    assert options == GenerationOptions(temperature=0.5, seed=2**63, max_tokens=9)
    assert [type(getattr(options, n)) for n in ("temperature", "seed")] == [float, int]


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


def test_stream_generate_serves_those_who_hold_an_mlx_lm_pair(model: nn.Module) -> None:
    theirs = [r.token for r in mlx_lm_stream(model, byte_tokenizer(), "Hello", max_tokens=20)]
    drafter = random_drafter(vocab_size=258)
    ids = byte_tokenizer().encode("Hello")
    for given in ("Hello", mx.array(ids), ids):
        ours = redrafter_mlx.stream_generate(
            model, byte_tokenizer(), given, drafter=drafter, max_tokens=20
        )
        assert [r.token for r in ours] == theirs


def test_stream_generate_takes_mlx_lms_draft_model(model: nn.Module) -> None:
    seen: list[tuple[int, int]] = []
    given = {"draft_model": model, "num_draft_tokens": 3, "max_tokens": 20}
    theirs = [r.token for r in mlx_lm_stream(model, byte_tokenizer(), "Hello", **given)]
    ours = [
        *redrafter_mlx.stream_generate(
            model, byte_tokenizer(), "Hello", **given,
            prompt_progress_callback=lambda *read: seen.append(read),
        )
    ]  # fmt: skip
    assert [r.token for r in ours] == theirs
    assert ours[-1].tokens_per_step > 2.5
    assert seen[-1] == (5, 5)
    with pytest.raises(BadInputError, match="two drafters"):
        redrafter_mlx.stream_generate(model, byte_tokenizer(), "Hello", drafter="lookup", **given)


@pytest.mark.parametrize(
    ("name", "instead"),
    [("sampler", "temperature"), ("logits_processors", "logit_bias"), ("max_kv_size", "memory"),
     ("prompt_cache", "Redrafter"), ("prefill_step_size", "leave it out")],
)  # fmt: skip
def test_another_keyword_of_mlx_lms_is_refused_with_what_to_give_instead(
    model: nn.Module, name: str, instead: str
) -> None:
    with pytest.raises(BadInputError, match=f"no {name} here; .*{instead}"):
        redrafter_mlx.stream_generate(model, byte_tokenizer(), "Hello", **{name: 1})


def test_warming_up_leaves_answers_as_they_are(redrafter: Redrafter) -> None:
    before = redrafter.generate(PROMPT, max_tokens=10)
    redrafter.warm_up()
    assert redrafter.generate(PROMPT, max_tokens=10).token_ids == before.token_ids


# Sessions


def turn(session: Session, text: str, n: int = 20) -> list[Response]:
    return list(session.stream(text, max_tokens=n))


def fresh_answer(redrafter: Redrafter, session: Session, text: str, n: int = 20) -> list[int]:
    system = [] if session.system is None else [{"role": "system", "content": session.system}]
    messages = [*system, *session.messages, {"role": "user", "content": text}]
    return redrafter.generate(messages, max_tokens=n, cache_prompt=False).token_ids


def test_every_turn_says_what_a_fresh_reading_of_the_conversation_would(
    redrafter: Redrafter,
) -> None:
    session = redrafter.session(system="Be brief.")
    for text in ("one", "two", "three"):
        want = fresh_answer(redrafter, session, text)
        assert [r.token for r in turn(session, text)] == want
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 3


def test_a_turn_reads_only_what_is_new(redrafter: Redrafter) -> None:
    session = redrafter.session()
    first = turn(session, "a rather long first message, to be read once")
    # Random bytes may be encoded as other tokens again; but the prompt is never read again.
    last = turn(session, "and")[-1]
    assert first[-1].cached_tokens == 0
    assert last.cached_tokens >= first[0].prompt_tokens
    assert last.prompt_tokens - last.cached_tokens < first[0].prompt_tokens


def test_changing_the_system_message_rereads_the_conversation(redrafter: Redrafter) -> None:
    session = redrafter.session(system="Be brief.")
    turn(session, "one")
    session.system = "Be long."
    want = fresh_answer(redrafter, session, "two")
    assert [r.token for r in turn(session, "two")] == want


@pytest.mark.parametrize("after", [1, 2, 7])
def test_a_closed_answer_keeps_what_was_said_and_the_session_goes_on(
    redrafter: Redrafter, after: int
) -> None:
    session = redrafter.session()
    turn(session, "one")
    stream = session.stream("two", max_tokens=30)
    given = [next(stream).text for _ in range(after)]
    stream.close()
    assert session.messages[-1] == {"role": "assistant", "content": "".join(given)}
    want = fresh_answer(redrafter, session, "three")
    assert [r.token for r in turn(session, "three")] == want


def test_an_exception_in_the_consumer_leaves_the_session_consistent(redrafter: Redrafter) -> None:
    session = redrafter.session()

    def consume() -> None:
        for i, _ in enumerate(session.stream("one", max_tokens=30)):
            _ = 1 // (3 - i)

    with pytest.raises(ZeroDivisionError):
        consume()
    want = fresh_answer(redrafter, session, "two")
    assert [r.token for r in turn(session, "two")] == want


@pytest.mark.parametrize("at", range(1, 8))
def test_an_interrupt_inside_a_step_leaves_the_session_consistent(
    redrafter: Redrafter, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C can arrive in any call of the target, also in the prompt's."""
    session = redrafter.session()
    turn(session, "one")
    calls = 0

    def interrupting(honest: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **named: object) -> object:
            nonlocal calls
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGINT)
            return honest(*args, **named)

        return call

    with monkeypatch.context() as patched:
        for name in ("hidden", "verify"):
            patched.setattr(redrafter.target, name, interrupting(getattr(redrafter.target, name)))
        with pytest.raises(KeyboardInterrupt):
            turn(session, "two", 400)
    answered = session.messages[2:]  # empty if the interrupt came before the first token
    assert [m["role"] for m in answered] in ([], ["user", "assistant"])
    assert all(m["content"] for m in answered)
    want = fresh_answer(redrafter, session, "three")
    assert [r.token for r in turn(session, "three")] == want


def test_a_turn_that_stops_before_its_first_token_is_forgotten(
    redrafter: Redrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = redrafter.session()
    turn(session, "one")
    before = list(session.messages)

    def broken(*_: object) -> None:
        raise ValueError("broken")

    with monkeypatch.context() as patched:
        patched.setattr(redrafter.target, "hidden", broken)
        with pytest.raises(EngineFailedError, match="broken"):
            turn(session, "two")
    assert session.messages == before
    session.stream("two").close()
    assert session.messages == before


def test_an_answer_that_ends_without_a_text_is_kept(redrafter: Redrafter) -> None:
    session = redrafter.session()
    first = turn(session, "one", 1)[0].token
    session.clear()
    redrafter.tokenizer.eos_token_ids = {first}
    assert [r.finish_reason for r in turn(session, "one")] == ["stop"]
    assert [m["content"] for m in session.messages] == ["one", ""]


def test_a_session_answers_one_turn_at_a_time(redrafter: Redrafter) -> None:
    session = redrafter.session()
    running = session.stream("one", max_tokens=20)
    first = next(running).text
    with ThreadPoolExecutor(1) as other, pytest.raises(BadInputError, match="another turn"):
        other.submit(turn, session, "two").result()
    answer = first + "".join(r.text for r in running)
    assert [m["content"] for m in session.messages] == ["one", answer]
    want = fresh_answer(redrafter, session, "two")
    assert [r.token for r in turn(session, "two")] == want


def test_a_turn_is_over_when_its_finish_reason_is_read(redrafter: Redrafter) -> None:
    session = redrafter.session()
    first = session.stream("one", max_tokens=3)
    while next(first).finish_reason is None:
        pass
    assert turn(session, "two")
    assert list(first) == []
    assert [m["content"] for m in session.messages][::2] == ["one", "two"]


def test_turns_of_many_threads_leave_whole_turns(redrafter: Redrafter) -> None:
    session = redrafter.session()

    def ask(i: int) -> bool:
        try:
            turn(session, f"question {i}", 5)
        except BadInputError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        answered = sum(pool.map(ask, range(12)))
    assert 1 <= answered == len(session.messages) // 2
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * answered
    want = fresh_answer(redrafter, session, "last")
    assert [r.token for r in turn(session, "last")] == want


def test_a_turn_follows_those_that_ended_before_its_first_token(redrafter: Redrafter) -> None:
    session = redrafter.session()
    later = session.stream("two", max_tokens=20)
    turn(session, "one")
    want = fresh_answer(redrafter, session, "two")
    assert [r.token for r in later] == want


def test_a_cleared_session_is_a_new_one(redrafter: Redrafter) -> None:
    session = redrafter.session()
    first = [r.token for r in turn(session, "one")]
    turn(session, "two")
    session.clear()
    assert session.messages == []
    assert [r.token for r in turn(session, "one")] == first


def test_an_empty_turn_is_refused_and_changes_nothing(redrafter: Redrafter) -> None:
    session = redrafter.session()
    with pytest.raises(BadInputError, match="empty"):
        session.stream("  \n")
    assert session.messages == []


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


# Threads and asyncio


def test_any_thread_may_answer(model: nn.Module) -> None:
    with ThreadPoolExecutor(1) as loader:
        redrafter = loader.submit(make, model).result()
    want = redrafter.generate(PROMPT, max_tokens=20).token_ids
    with ThreadPoolExecutor(1) as other:
        assert other.submit(redrafter.generate, PROMPT, max_tokens=20).result().token_ids == want


def test_one_answer_may_be_read_from_several_threads(redrafter: Redrafter) -> None:
    """As in web frameworks, which call each `next` of a generator in any thread of a pool."""
    want = redrafter.generate(PROMPT, max_tokens=30, temperature=1.0, seed=3).token_ids
    stream = redrafter.stream(PROMPT, max_tokens=30, temperature=1.0, seed=3, logprobs=True)
    got: list[int] = []
    while True:
        box: list[Response | None] = []
        thread = threading.Thread(target=lambda box=box: box.append(next(stream, None)))
        thread.start()
        thread.join()
        if box[0] is None:
            break
        got.append(box[0].token)
        assert box[0].logprobs is not None
        assert box[0].logprobs.shape == (258,)
        assert box[0].logprobs[box[0].token].item() <= 0
    assert got == want


def test_callers_at_the_same_time_queue_up_and_each_gets_its_own_answer(
    redrafter: Redrafter,
) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(6)]
    want = [redrafter.generate(p, max_tokens=25).token_ids for p in prompts]
    busy = threading.Semaphore(1)
    honest = redrafter.target.hidden

    def alone(*args: object) -> mx.array:
        assert busy.acquire(blocking=False), "two steps at once"
        try:
            return honest(*args)  # type: ignore[arg-type]
        finally:
            busy.release()

    redrafter.target.hidden = alone  # type: ignore[method-assign]
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda p: redrafter.generate(p, max_tokens=25).token_ids, prompts))
    assert got == want


def test_two_open_answers_in_one_thread_do_not_block_each_other(redrafter: Redrafter) -> None:
    want = [redrafter.generate(p, max_tokens=15).token_ids for p in (PROMPT, [9, 8])]
    streams = [redrafter.stream(p, max_tokens=15) for p in (PROMPT, [9, 8])]
    got = zip(*streams, strict=True)
    assert [list(t) for t in zip(*(tuple(r.token for r in pair) for pair in got), strict=True)] == (
        want
    )


def test_astream_gives_the_same_answer_and_leaves_the_loop_free(redrafter: Redrafter) -> None:
    want = redrafter.generate(PROMPT, max_tokens=20).token_ids

    async def main() -> tuple[list[int], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        got = [r.token async for r in redrafter.astream(PROMPT, max_tokens=20)]
        ticking.cancel()
        return got, ticks

    got, ticks = asyncio.run(main())
    assert got == want
    assert ticks > 20


def test_a_cancelled_astream_leaves_the_model_usable(redrafter: Redrafter) -> None:
    want = redrafter.generate(PROMPT, max_tokens=20).token_ids

    async def main() -> None:
        async def consume() -> None:
            async for _ in redrafter.astream(PROMPT, max_tokens=10_000):
                pass

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert redrafter.generate(PROMPT, max_tokens=20).token_ids == want


@pytest.mark.parametrize("scaled", [True, False])
def test_rotary_frequencies_can_be_used_by_the_engines_thread(scaled: bool) -> None:
    """They are lazy in mlx-lm's LongRoPE, and a thread cannot evaluate another one's arrays."""
    model = byte_model()
    if scaled:
        for layer in model.model.layers:
            dims = layer.self_attn.rope.dims
            layer.self_attn.rope = SuScaledRoPE(
                dims, max_position_embeddings=512, original_max_position_embeddings=64,
                short_factor=[1.0] * (dims // 2), long_factor=[2.0] * (dims // 2),
            )  # fmt: skip
    answer = Redrafter(model, byte_tokenizer()).generate([1, 2, 3], max_tokens=4)
    assert len(answer.token_ids) == 4


def test_whole_answers_have_their_log_probabilities_if_asked_for() -> None:
    redrafter = Redrafter(byte_model(), byte_tokenizer())
    answer = redrafter.generate([1, 2, 3], max_tokens=4, logprobs=True)
    assert answer.logprobs is not None
    assert [int(mx.argmax(p).item()) for p in answer.logprobs] == answer.token_ids
    assert redrafter.generate([1, 2, 3], max_tokens=4).logprobs is None


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
