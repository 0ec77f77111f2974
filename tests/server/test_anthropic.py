"""Anthropic's Messages API through its own client, and its events as they are on the wire."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, get_args

import anthropic
import httpx2 as httpx
import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import Discriminator, TypeAdapter
from scripted import Scripted
from serving import ASKED, CITY, CONTEXT, KEY, named_events

from redrafter_mlx.engine.engine import Redrafter

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
TOOL = {"name": "weather", "description": "Tells it.", "input_schema": CITY}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
EVENT = TypeAdapter(Annotated[get_args(RawMessageStreamEvent)[0], Discriminator("type")])


@pytest.fixture(scope="module")
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)


def answer(
    url: str, writer: Scripted, says: str, /, **asked: object
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the events of a stream in which the model writes `says`, and the message without one.

    The client's own accumulation of the stream must be that message.
    """
    writer.script = lambda _: says
    body = {"model": "tiny", "max_tokens": 1000, "messages": ASKED, **asked}
    streamed = httpx.post(f"{url}{PATH}?beta=true", json={**body, "stream": True}, timeout=60)
    assert streamed.status_code == 200, streamed.text
    events = named_events(streamed.text)
    for event in events:
        if event["type"] != "ping":
            EVENT.validate_python(event)
    whole = httpx.post(url + PATH, json=body, timeout=60).json()
    ours = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)
    with ours.messages.stream(**body) as stream:
        summed = stream.get_final_message().to_dict()
    for message in (whole, summed):
        for block in message["content"]:
            block.pop("id", None)
    for key in ("content", "stop_reason", "stop_sequence", "usage"):
        assert {**summed, "usage": {k: summed["usage"][k] for k in whole["usage"]}}[key] == (
            whole[key]
        )
    return events, whole


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, each once in a row."""
    names = [event.get("delta", event).get("type", event["type"]) for event in events]
    return [name for i, name in enumerate(names) if not i or names[i - 1] != name]


def test_a_text_is_that_of_the_library_streamed_or_whole(
    client: anthropic.Anthropic, model: Redrafter
) -> None:
    want = model.generate(ASKED, max_tokens=30, temperature=1.0, top_k=20, seed=7, draft=False)
    given = {"model": "tiny", "messages": ASKED, "max_tokens": 30}
    sampled = {"temperature": 1.0, "top_k": 20, "seed": 7}
    whole = client.messages.create(**given, extra_body=sampled)
    with client.messages.stream(**given, extra_body=sampled) as stream:
        texts = list(stream.text_stream)
    assert whole.content[0].text == "".join(texts) == want.text
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 30)
    plain = {**sampled, "x_redrafter": {"draft": False}}
    assert client.messages.create(**given, extra_body=plain).content[0].text == want.text


def test_a_stream_has_every_event_in_order(written: str, writer: Scripted) -> None:
    writer.cached = 9
    events, whole = answer(written, writer, f"<think>hm</think>Well: {CALL}", tools=[TOOL],
                           thinking={"type": "enabled", "budget_tokens": 1024})  # fmt: skip
    writer.cached = 0
    assert kinds(events) == [
        "message_start", "ping",
        "content_block_start", "thinking_delta", "signature_delta", "content_block_stop",
        "content_block_start", "text_delta", "content_block_stop",
        "content_block_start", "input_json_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    thinking, text, used = whole["content"]
    assert (thinking["thinking"], bool(thinking["signature"])) == ("hm", True)
    assert text == {"type": "text", "text": "Well: "}
    assert used == {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}
    assert whole["stop_reason"] == "tool_use"
    usage = whole["usage"]
    assert usage["cache_read_input_tokens"] == 9
    prompt = events[0]["message"]["usage"]["input_tokens"]
    assert usage["input_tokens"] == prompt - 9


@pytest.mark.parametrize(
    ("says", "changes", "reason", "stop", "text"),
    [
        ("one END two", {"stop_sequences": ["x", "END"]}, "stop_sequence", "END", "one "),
        ("one END two", {"stop_sequences": []}, "end_turn", None, "one END two"),
        ("one END two", {"max_tokens": 3}, "max_tokens", None, "one"),
    ],
)
def test_it_says_why_an_answer_ended(
    written: str,
    writer: Scripted,
    says: str,
    changes: dict[str, object],
    reason: str,
    stop: str | None,
    text: str,
) -> None:
    _, whole = answer(written, writer, says, **changes)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop)
    assert whole["content"] == [{"type": "text", "text": text}]


def test_every_kind_of_block_reaches_the_model(written: str, writer: Scripted) -> None:
    """The billing line, which changes with each version and session, is left out."""
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cch=abc"},
        {"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "T"},
    ]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "U"}, {"type": "text", "text": "V"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "R", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "A"},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "c2", "name": "weather", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "rain"},
            {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
            {"type": "text", "text": "W"}]},
        {"role": "system", "content": "later"},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "X"},
    ]  # fmt: skip
    answer(written, writer, "so", system=system, messages=messages)
    want = (
        "<|im_start|>system\nS\n\nT<|im_end|>\n<|im_start|>user\nU\n\nV<|im_end|>\n"
        '<|im_start|>assistant\n<think>R</think>A[c1 {"name": "weather", "arguments": {"city": '
        '"Oslo"}}][c2 {"name": "weather", "arguments": {}}]<|im_end|>\n'
        "<|im_start|>tool\nrain(c1)<|im_end|>\n<|im_start|>tool\nerror(c2)<|im_end|>\n"
        "<|im_start|>user\nW<|im_end|>\n<|im_start|>system\nlater<|im_end|>\n"
        "<|im_start|>assistant\nB<|im_end|>\n<|im_start|>user\nX<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert writer.rendered[-1] == want


def test_an_answer_goes_on_with_the_text_that_the_assistant_has_begun(
    written: str, writer: Scripted
) -> None:
    _, whole = answer(
        written, writer, "b", messages=[*ASKED, {"role": "assistant", "content": "a"}]
    )
    assert writer.rendered[-1].endswith("<|im_start|>assistant\na")
    assert whole["content"] == [{"type": "text", "text": "b"}]


def test_tokens_are_counted_even_of_a_prompt_that_is_too_long(
    client: anthropic.Anthropic, model: Redrafter
) -> None:
    given = {"model": "tiny", "messages": ASKED}
    assert client.messages.count_tokens(**given).input_tokens == len(model.encode(ASKED))
    with_tools = client.messages.count_tokens(**given, tools=[TOOL], system="S").input_tokens
    assert with_tools > len(model.encode(ASKED)) + len("Tells it.")
    long = [{"role": "user", "content": "x" * CONTEXT}]
    assert client.messages.count_tokens(model="tiny", messages=long).input_tokens >= CONTEXT


def test_a_limit_beyond_the_context_is_cut(client: anthropic.Anthropic) -> None:
    long = [{"role": "user", "content": "x" * (CONTEXT - 100)}]
    given = {"model": "tiny", "messages": long, "max_tokens": 32000}
    with client.messages.stream(**given, extra_body={"logit_bias": {"5": 100}}) as stream:
        made = stream.get_final_message()
    assert made.stop_reason == "max_tokens"
    read = made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
    assert read + made.usage.output_tokens == CONTEXT


def test_a_tool_is_called_if_it_must_be(client: anthropic.Anthropic) -> None:
    tool = {**TOOL, "input_schema": {"type": "object", "properties": {"n": {"enum": [1, 2]}},
                                     "required": ["n"]}}  # fmt: skip
    given = {"model": "tiny", "max_tokens": 200, "messages": ASKED}
    two = [{**tool, "name": "other"}, tool]
    for tools, choice in (
        ([tool], {"type": "any"}),
        (two, {"type": "tool", "name": "weather"}),
        ([tool], {"type": "any", "disable_parallel_tool_use": True}),
    ):
        made = client.messages.create(**given, tools=tools, tool_choice=choice)
        (block,) = made.content
        assert (block.type, block.name, made.stop_reason) == ("tool_use", "weather", "tool_use")
        assert block.input["n"] in (1, 2)
    none = client.messages.create(**given, tools=two, tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["text"]


def test_a_format_is_enforced_by_a_grammar(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": schema}
    for more in ({"output_config": {"format": form}}, {"output_format": form}):
        made = client.messages.create(model="tiny", max_tokens=80, messages=ASKED, extra_body=more)
        assert json.loads(made.content[0].text)["a"] in (1, 2)


def test_each_mistake_has_its_class_of_error_and_is_named(
    client: anthropic.Anthropic, url: str
) -> None:
    def ask(**changes: object) -> object:
        given = {"model": "tiny", "messages": ASKED, "max_tokens": 1, **changes}
        return client.messages.create(**given)

    def user(*blocks: object) -> list[object]:
        return [{"role": "user", "content": [{"type": "text", "text": "x"}, *blocks]}]

    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    strict = {**TOOL, "strict": True, "input_schema": {"type": "object", "not": {}}}
    for param, changes in {
        "temperature": {"extra_body": {"temperature": 2.5}},
        "max_tokens": {"max_tokens": 0},
        "messages": {"messages": []},
        "messages.0.role": {"messages": [{"role": "robot", "content": "x"}]},
        "messages.0.content.1": {"messages": user(image)},
        "messages.0.content.1.content.0": {
            "messages": user({"type": "tool_result", "tool_use_id": "c", "content": [image]})},
        "messages.0.content.1.tool_use_id": {"messages": user({"type": "tool_result"})},
        "system.0": {"system": [image]},
        "tools.0.input_schema": {"tools": [{"name": "f"}]},
        "tools.1.input_schema": {
            "tools": [{"type": "web_search_20250305", "name": "web_search"}, strict],
            "tool_choice": {"type": "any"}},
        "tools.0.name": {"tools": [{**TOOL, "name": "a b"}]},
        "tool_choice": {"tool_choice": {"type": "any"}},
        "output_config.format.schema": {
            "extra_body": {"output_config": {"format": {"type": "json_schema"}}}},
        "mcp_servers": {"extra_body": {"mcp_servers": [{"name": "x"}]}},
        "thinking.type": {"thinking": {"type": "much"}},
    }.items():  # fmt: skip
        with pytest.raises(anthropic.BadRequestError) as bad:
            ask(**changes)
        assert bad.value.body["error"]["message"].startswith((f"{param}: ", f"{param} is "))
        assert bad.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match=r"image.*not supported"):
        ask(messages=user(image))
    with pytest.raises(anthropic.NotFoundError, match="there is: tiny"):
        ask(model="claude")
    with pytest.raises(anthropic.BadRequestError) as long:
        ask(messages=[{"role": "user", "content": "x" * (CONTEXT + 5)}])
    said = long.value.body["error"]["message"]
    assert re.fullmatch(rf"prompt is too long: 20\d\d tokens > {CONTEXT} maximum", said)
    with pytest.raises(anthropic.RequestTooLargeError):
        ask(messages=[{"role": "user", "content": "x" * 2**20}])
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(
            model="tiny", messages=ASKED, max_tokens=1
        )
    for path in (PATH, COUNT, "/messages", "/v1/messages/batches"):
        lost = httpx.post(url + path, json={}, timeout=60).json()
        assert (lost["type"], lost["error"]["type"]) == ("error", "authentication_error")
    missing = httpx.post(
        f"{url}/v1/messages/batches", json={}, headers={"x-api-key": KEY}, timeout=60
    )
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


def test_models_are_listed_for_this_client_too(client: anthropic.Anthropic) -> None:
    (listed,) = client.models.list()
    assert (listed.id, listed.type, listed.display_name) == ("tiny", "model", "tiny")
    assert client.models.retrieve("tiny").created_at == listed.created_at
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude")


def test_both_kinds_of_keys_are_keys(url: str) -> None:
    body = {"messages": ASKED, "max_tokens": 1}
    for headers, status in (
        ({"x-api-key": KEY}, 200),
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": ""}, 401),
        ({}, 401),
    ):
        assert httpx.post(url + PATH, json=body, headers=headers, timeout=60).status_code == status
        counted = {"messages": ASKED}
        found = httpx.post(url + COUNT, json=counted, headers=headers, timeout=60)
        assert found.status_code == status
    assert httpx.head(url, timeout=60).status_code == 200


def test_what_is_ignored_is_named(
    written: str, writer: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "redrafter_mlx.server"):
        answer(written, writer, "x", metadata={"user_id": "u"}, service_tier="auto",
               tools=[{"type": "web_search_20250305", "name": "web_search"}])  # fmt: skip
    assert f"{PATH}: ignored service_tier, tools.0 (web_search_20250305)" in caplog.messages


def test_a_failure_in_a_stream_is_its_last_event(written: str, writer: Scripted) -> None:
    def fail(_: str) -> str:
        raise RuntimeError("broken")

    writer.script = fail
    ours = anthropic.Anthropic(base_url=written, api_key="x", max_retries=0)
    given = {"model": "tiny", "messages": ASKED, "max_tokens": 9}
    with pytest.raises(anthropic.APIStatusError) as failed, ours.messages.stream(**given) as stream:
        list(stream)
    assert failed.value.body["error"]["type"] == "api_error"
    with pytest.raises(anthropic.InternalServerError):
        ours.messages.create(**given)
