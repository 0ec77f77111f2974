"""The server through OpenAI's own client: every endpoint, and every class of errors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import httpx2 as httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import (
    ASKED,
    CONTEXT,
    KEY,
    ready,
    tiny_redrafter,
)
from tiny import plain_tokens
from waiting import wait_for

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.weights.text.chat import render_chat


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def plain_text(model: Redrafter, prompt: list[int], tokens: int) -> str:
    """Return the answer of mlx-lm's own loop, decoded from its tokens."""
    made = plain_tokens(model.model, prompt, tokens)
    return str(model.tokenizer.decode([t for t in made if t not in model.tokenizer.eos_token_ids]))


def test_a_chat_answer_is_plain_decoding_streamed_or_whole(
    client: openai.OpenAI, model: Redrafter
) -> None:
    want = plain_text(model, model.encode(ASKED), 40)
    given = {"model": "tiny", "messages": ASKED, "max_completion_tokens": 40}
    whole = client.chat.completions.create(**given)
    chunks = list(client.chat.completions.create(**given, stream=True))
    assert whole.choices[0].message.content == want
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == want
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    assert {c.id for c in chunks} == {chunks[0].id}
    assert whole.choices[0].finish_reason == "length"


def test_a_completion_is_plain_decoding_streamed_or_whole(
    client: openai.OpenAI, model: Redrafter
) -> None:
    want = {text: plain_text(model, model.encode(text, raw=True), 16) for text in ("ab", "cde")}
    whole = client.completions.create(model="tiny", prompt=["ab", "cde"], n=2)
    assert [c.text for c in whole.choices] == [want["ab"]] * 2 + [want["cde"]] * 2
    assert [c.index for c in whole.choices] == [0, 1, 2, 3]
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 64)
    texts = ["", ""]
    for chunk in client.completions.create(model="tiny", prompt=["ab", "cde"], stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [want["ab"], want["cde"]]
    echo = client.completions.create(model="tiny", prompt=[97, 98], echo=True)
    ids = model.tokenizer.decode([97, 98])
    assert echo.choices[0].text == ids + plain_text(model, [97, 98], 16)


def test_a_completion_keeps_the_space_that_its_prompt_lacks(
    client: openai.OpenAI, model: Redrafter
) -> None:
    (space,) = model.encode(" ", raw=True)
    bias = {str(space): 100}
    given = {"model": "tiny", "prompt": "ab", "max_tokens": 3, "logit_bias": bias}
    answer = client.completions.create(**given, logprobs=2, echo=False).choices[0]
    assert answer.text == " " * 3
    assert answer.logprobs is not None
    assert answer.logprobs.tokens == [" "] * 3
    raw = model.generate("ab", raw=True, max_tokens=3, logit_bias={space: 100})
    assert raw.text == answer.text
    # Text that a stop string may begin in is held back; the tokens' places in it are the same.
    held = client.completions.create(**given, logprobs=2, stop=["    x"]).choices[0]
    for one in (answer, held):
        assert one.logprobs is not None
        assert one.logprobs.text_offset == [0, 1, 2]


def test_seeds_make_answers_repeatable_and_the_answers_of_one_request_different(
    client: openai.OpenAI, model: Redrafter
) -> None:
    given = {"model": "tiny", "messages": ASKED, "max_tokens": 30, "temperature": 1.5, "n": 2}
    once, again = (client.chat.completions.create(**given, seed=-7) for _ in range(2))
    texts = [choice.message.content for choice in once.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert texts[0] != texts[1]
    for number, text in enumerate(texts):
        seed = 2**64 - 7 + number
        alone = model.generate(ASKED, max_tokens=30, temperature=1.5, seed=seed, draft=False)
        assert text == alone.text
    prompt = {"model": "tiny", "prompt": ["ab", "cd", "cd"], "temperature": 1.5, "seed": 7}
    several = client.completions.create(**prompt)
    alone = client.completions.create(**{**prompt, "prompt": "cd"})
    assert [choice.text for choice in several.choices[1:]] == [alone.choices[0].text] * 2
    assert several.usage is not None
    assert several.usage.prompt_tokens == 6


@pytest.mark.parametrize(
    ("given", "thinking"),
    [
        ({}, None),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {}}, None),
    ],
)
def test_the_chat_template_is_told_whether_to_reason(
    client: openai.OpenAI,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, object],
    thinking: bool | None,
) -> None:
    """None leaves it to the template."""
    told = []

    def recorded(*args: Any, **options: Any) -> list[int]:
        told.append(options["thinking"])
        return render_chat(*args, **options)

    monkeypatch.setattr("redrafter_mlx.structured.plan.render_chat", recorded)
    client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=1, extra_body=given)
    assert told == [thinking]


def test_reasoning_in_a_message_is_given_to_the_chat_template(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def recorded(tokenizer: Any, messages: Any, **options: Any) -> list[int]:
        given.append(messages)
        return render_chat(tokenizer, messages, **options)

    monkeypatch.setattr("redrafter_mlx.structured.plan.render_chat", recorded)
    answer = {"role": "assistant", "content": "So.", "reasoning_content": "hm"}
    client.chat.completions.create(model="tiny", messages=[*ASKED, answer, *ASKED], max_tokens=1)
    assert given == [[*ASKED, answer, *ASKED]]


def test_penalties_are_those_of_the_library(client: openai.OpenAI, model: Redrafter) -> None:
    given = {"frequency_penalty": 1.5, "presence_penalty": -0.5}
    answer = client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=30, **given)
    alone = model.generate(ASKED, max_tokens=30, draft=False, **given)
    assert answer.choices[0].message.content == alone.text
    assert alone.text != model.generate(ASKED, max_tokens=30).text


def test_usage_and_timings_count_the_tokens(client: openai.OpenAI, model: Redrafter) -> None:
    given = {"model": "tiny", "messages": ASKED, "max_tokens": 25}
    prompt = len(model.encode(ASKED))
    client.chat.completions.create(**given)
    *_, last, usage = client.chat.completions.create(
        **given, stream=True, stream_options={"include_usage": True}
    )
    assert usage.choices == []
    assert usage.usage is not None
    counted = usage.usage
    assert (counted.prompt_tokens, counted.completion_tokens) == (prompt, 25)
    assert counted.total_tokens == prompt + 25
    timings = last.model_extra["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == prompt
    assert counted.prompt_tokens_details is not None
    assert counted.prompt_tokens_details.cached_tokens == timings["cache_n"] > 0
    assert timings["predicted_n"] == 25
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]


def test_an_answer_ends_at_stop_strings_and_at_the_end_of_the_context(
    client: openai.OpenAI, model: Redrafter
) -> None:
    text = plain_text(model, model.encode(ASKED), 40)
    stop = text[10:12]
    want = text[: text.index(stop)]
    given = {"model": "tiny", "messages": ASKED, "max_tokens": 40}
    for stops in (stop, ["never", stop]):
        ended = client.chat.completions.create(**given, stop=stops).choices[0]
        assert (ended.message.content, ended.finish_reason) == (want, "stop")
    for nothing in ("", ["", ""], None):
        assert (
            client.chat.completions.create(**given, stop=nothing).choices[0].message.content == text
        )
    whole = client.completions.create(model="tiny", prompt="a" * (CONTEXT - 50), max_tokens=10**9)
    assert whole.usage is not None
    assert whole.choices[0].finish_reason in ("length", "stop")
    assert whole.usage.total_tokens <= CONTEXT


def test_log_probabilities_are_those_of_the_emitted_tokens(
    client: openai.OpenAI, model: Redrafter
) -> None:
    want = [
        (r.token, float(r.logprobs[r.token]))
        for r in model.stream(ASKED, max_tokens=12, logprobs=True, draft=False)
        if r.logprobs is not None
    ]
    given = {"model": "tiny", "messages": ASKED, "max_tokens": 12}
    chat = client.chat.completions.create(**given, logprobs=True, top_logprobs=3).choices[0]
    assert chat.logprobs is not None
    assert chat.logprobs.content is not None
    entries = chat.logprobs.content
    assert [e.logprob for e in entries] == pytest.approx([value for _, value in want], abs=1e-4)
    assert [e.token for e in entries] == [model.tokenizer.decode([t]) for t, _ in want]
    for entry in entries:  # greedy: the emitted token is the likeliest one
        assert entry.top_logprobs[0].token == entry.token
        assert len(entry.top_logprobs) == 3
    streamed = client.chat.completions.create(**given, logprobs=True, stream=True)
    pieces = [c.choices[0].logprobs.content for c in streamed if c.choices[0].logprobs]
    assert sum(map(len, filter(None, pieces))) == 12
    text = client.completions.create(model="tiny", prompt="ab", logprobs=2).choices[0]
    assert text.logprobs is not None
    assert len(text.logprobs.tokens or []) == len(text.logprobs.top_logprobs or []) == 16


def test_log_probabilities_give_the_bytes_of_parts_of_characters(
    client: openai.OpenAI, model: Redrafter
) -> None:
    first, second = model.encode("\u00e4", raw=True)  # C3 A4 in UTF-8
    given = {"model": "tiny", "max_tokens": 2, "logit_bias": {str(first): 100, str(second): 50}}
    chat = client.chat.completions.create(
        **given, messages=ASKED, logprobs=True, top_logprobs=2
    ).choices[0]
    assert chat.logprobs is not None
    (entry, *_) = chat.logprobs.content or []
    assert [(e.token, e.bytes) for e in entry.top_logprobs] == [
        ("\ufffd", [0xC3]),
        ("\ufffd", [0xA4]),
    ]
    text = client.completions.create(**given, prompt="ab", logprobs=2).choices[0]
    assert text.logprobs is not None
    assert text.logprobs.tokens == [r"bytes:\xc3"] * 2
    assert [*(text.logprobs.top_logprobs or [{}])[0]] == [r"bytes:\xc3", r"bytes:\xa4"]


def test_values_that_change_nothing_are_accepted(client: openai.OpenAI, model: Redrafter) -> None:
    want = plain_text(model, model.encode(ASKED), 5)
    for changes in (
        {"model": "default_model"},
        {"max_tokens": 5.0},
        {"max_completion_tokens": -1},
        {"top_k": -1},
        {"top_k": 0.0, "n": 1.0, "seed": 3.0},
        {"functions": [], "function_call": "none"},
        {"response_format": {}},
        {"tools": [], "response_format": {"type": "text"}},
    ):
        given = {"model": "tiny", "messages": ASKED, "max_tokens": 5, **changes}
        answer = client.chat.completions.create(**{"model": "tiny"}, messages=[], extra_body=given)
        assert answer.choices[0].message.content == want
        assert answer.model == "tiny"
    text = plain_text(model, model.encode("ab", raw=True), 16)
    for changes in ({"best_of": 1}, {"suffix": ""}, {"max_tokens": -1}):
        whole = client.completions.create(model="tiny", prompt="ab", extra_body=changes)
        assert whole.choices[0].text == text


def test_a_chat_without_a_limit_of_tokens_may_fill_the_context(client: openai.OpenAI) -> None:
    for changes in ({"max_tokens": -1}, {"max_completion_tokens": -1}, {}):
        messages = [{"role": "user", "content": "x" * (CONTEXT - 300)}]
        answer = client.chat.completions.create(
            model="tiny", messages=messages, logit_bias={"97": 100}, extra_body=changes
        )
        assert answer.usage is not None
        assert answer.usage.total_tokens == CONTEXT


SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}, "rain": {"type": "boolean"}},
    "required": ["sky", "rain"],
    "additionalProperties": False,
}


def test_an_answer_has_the_form_that_was_asked_for(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=ASKED,
        n=2,
        temperature=1,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    )
    for choice in answer.choices:
        made = json.loads(choice.message.content or "")
        assert made["sky"] in ("blue", "grey")
        assert isinstance(made["rain"], bool)


def test_a_tool_that_must_be_called_is_called_whole_and_valid(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    given = {"model": "tiny", "messages": ASKED, "tools": [tool], "tool_choice": "required"}
    whole = client.chat.completions.create(**given).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls or []
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments).keys() == {"sky", "rain"}
    chunks = list(client.chat.completions.create(**given, stream=True))
    (streamed,) = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert streamed.function is not None
    assert streamed.function.arguments == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "blue"}
    called = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    after = client.chat.completions.create(
        model="tiny", messages=[*ASKED, called, result], max_tokens=3
    )
    assert after.usage is not None
    assert after.usage.completion_tokens == 3
    cut = client.chat.completions.create(**given, max_tokens=4).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)


def own_fields(chunks: Iterable[Any]) -> list[dict[str, Any]]:
    """Return `x_redrafter` of all chunks that have it."""
    return [c.model_extra["x_redrafter"] for c in chunks if "x_redrafter" in (c.model_extra or {})]


def test_own_fields_come_only_where_they_are_asked_for(
    client: openai.OpenAI, model: Redrafter
) -> None:
    def ask(own: object = None) -> list[dict[str, Any]]:
        extra = {} if own is None else {"extra_body": {"x_redrafter": own}}
        messages = [{"role": "user", "content": "again and again and again"}]
        return own_fields(
            client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=40, stream=True, **extra
            )
        )

    prefill, *steps = ask(True)
    prompt = model.encode("again and again and again")
    assert prefill == {"prefill": {"read": len(prompt), "total": len(prompt)}}
    tokens = [token["id"] for step in steps for token in step["tokens"]]
    assert tokens == plain_tokens(model.model, prompt, 40)
    assert {token["source"] for step in steps for token in step["tokens"]} == {"model", "lookup"}
    assert all(len(step["tokens"]) == step["accepted"] + 1 for step in steps[:-1])
    accepted = [token for token in steps[-1]["tokens"] if token["source"] != "model"]
    assert steps[-1]["accepted"] == len(accepted)
    undrafted = [fields for fields in ask({"draft": False}) if "prefill" not in fields]
    assert {step["drafted"] for step in undrafted} == {0}
    assert [token["id"] for step in undrafted for token in step["tokens"]] == tokens
    assert ask() == []


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is: tiny"):
        client.models.retrieve("none/such")


def test_each_mistake_has_its_class_of_error_and_names_the_parameter(
    client: openai.OpenAI, url: str
) -> None:
    def ask(**changes: object) -> object:
        given = {"model": "tiny", "messages": ASKED, "max_tokens": 1, **changes}
        return client.chat.completions.create(**given)  # type: ignore[call-overload]

    for param, changes in {
        "temperature": {"temperature": 2.5},
        "top_p": {"top_p": -0.1},
        "n": {"n": 0},
        "max_tokens": {"max_tokens": 0},
        "max_completion_tokens": {"max_completion_tokens": 1.5},
        "top_k": {"extra_body": {"top_k": -2}},
        "logit_bias": {"logit_bias": {"9999": 1}},
        "top_logprobs": {"top_logprobs": 2},
        "messages": {"messages": []},
        "messages.0.content": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.role": {"messages": [{"role": "robot", "content": "hi"}]},
        "response_format.json_schema.schema": {"response_format": {"type": "json_schema"}},
        "response_format": {  # no token can match it
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "s",
                    "schema": {"type": "integer", "minimum": 2, "maximum": 1},
                },
            }
        },
        "tool_choice": {"tool_choice": "required"},
        "tools.1.function.parameters": {
            "tool_choice": "required",
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": name,
                        "strict": name == "b",
                        "parameters": {"type": "object", "not": {}},
                    },
                }
                for name in "ab"
            ],
        },
        "functions": {"functions": [{"name": "f"}]},
        "function_call": {"function_call": "auto"},
        "audio": {"audio": {"voice": "alloy", "format": "wav"}},
        "modalities.1": {"modalities": ["text", "audio"]},
        "web_search_options": {"web_search_options": {}},
        "guided_json": {"extra_body": {"guided_json": {"type": "object"}}},
        "repeat_penalty": {"extra_body": {"repeat_penalty": -1}},
        "x_redrafter.draft": {"extra_body": {"x_redrafter": {"draft": "no"}}},
    }.items():
        with pytest.raises(openai.BadRequestError) as bad:
            ask(**changes)
        assert bad.value.param == param
        assert bad.value.type == "invalid_request_error"
    for param, changes in {"suffix": {"suffix": "!"}, "best_of": {"best_of": 2}}.items():
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="tiny", prompt="ab", **changes)  # type: ignore[call-overload]
        assert bad.value.param == param
    with pytest.raises(openai.NotFoundError, match="there is: tiny") as missing:
        ask(model="gpt-none")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="shorten") as long:
        ask(messages=[{"role": "user", "content": "x" * CONTEXT}])
    assert (long.value.param, long.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(
        openai.BadRequestError, match=f"maximum context length is {CONTEXT} tokens.* {CONTEXT + 5};"
    ) as long:
        client.completions.create(model="tiny", prompt="x" * (CONTEXT + 5))
    assert (long.value.param, long.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(openai.APIStatusError) as large:
        ask(messages=[{"role": "user", "content": "x" * 2**20}])
    assert large.value.status_code == 413
    wrong_method = httpx.get(f"{url}/v1/completions", headers={"Authorization": f"Bearer {KEY}"})
    assert wrong_method.status_code == 405
    assert json.loads(wrong_method.text)["error"]["type"] == "invalid_request_error"


def streamed(url: str, **asked: object) -> list[dict[str, Any]]:
    """Return the chunks of a streamed chat answer, with usage and our own fields."""
    extra = {"stream": True, "stream_options": {"include_usage": True}, "x_redrafter": True}
    body = {"messages": ASKED, **asked, **extra}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def metrics_of(url: str) -> dict[str, dict[str, float]]:
    """Return the samples of /metrics: values by the label that is not the model, by name."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            label = next((v for k, v in sample.labels.items() if k != "model_name"), "")
            found.setdefault(sample.name, {})[label] = sample.value
    return found


def test_metrics_count_what_usage_timings_and_steps_report() -> None:
    """Of two drafted answers; the second one finds its prompt in the cache."""
    with ready(tiny_redrafter()) as url:
        answers = [streamed(url, max_tokens=n) for n in (25, 30)]
        wait_for(lambda: metrics_of(url)["vllm:num_requests_running"] == {"": 0})
        found = metrics_of(url)
    usages = [chunks[-1]["usage"] for chunks in answers]
    timings = [chunks[-2]["timings"] for chunks in answers]
    steps = [c["x_redrafter"] for c in itertools.chain(*answers) if "x_redrafter" in c]
    drafted = [step for step in steps if step.get("drafted")]

    def total(records: list[dict[str, float]], name: str) -> float:
        return sum(record[name] for record in records)

    accepted = total(timings, "draft_n_accepted")
    assert total(timings, "cache_n") > 0 < accepted
    want = {
        "llamacpp:requests_processing": 0,
        "llamacpp:requests_deferred": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:prompt_tokens_total": total(usages, "prompt_tokens"),
        "llamacpp:prompt_tokens_total": total(timings, "prompt_n"),
        "vllm:prompt_tokens_cached_total": total(timings, "cache_n"),
        "vllm:generation_tokens_total": total(usages, "completion_tokens"),
        "llamacpp:tokens_predicted_total": total(timings, "predicted_n"),
        "llamacpp:prompt_seconds_total": total(timings, "prompt_ms") / 1000,
        "llamacpp:tokens_predicted_seconds_total": total(timings, "predicted_ms") / 1000,
        "vllm:spec_decode_num_drafts_total": len(drafted),
        "vllm:spec_decode_num_draft_tokens_total": total(timings, "draft_n"),
        "vllm:spec_decode_num_accepted_tokens_total": accepted,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 2,
    }
    assert {name: found[name][""] for name in want} == pytest.approx(want)
    assert found["vllm:request_success_total"] == {"length": 2}
    seconds = [
        found[f"vllm:{name}_seconds_sum"][""]
        for name in ("time_to_first_token", "e2e_request_latency")
    ]
    assert 0 < seconds[0] < seconds[1]
    by_position = found["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert by_position == {
        str(at): sum(step["accepted"] > at for step in drafted) for at in range(len(by_position))
    }
    assert sum(by_position.values()) == accepted


def test_the_tokens_of_a_chat_answer_add_up_to_its_text(
    client: openai.OpenAI, model: Redrafter
) -> None:
    (space,) = model.encode(" ", raw=True)
    given = {"model": "tiny", "messages": ASKED, "max_tokens": 3, "logprobs": True}
    given["logit_bias"] = {str(space): 100}
    whole = client.chat.completions.create(**given).choices[0]
    assert whole.message.content == "   "
    assert whole.logprobs is not None
    assert [entry.token for entry in whole.logprobs.content or ()] == [" "] * 3
    chunks = client.chat.completions.create(**given, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "   "
