"""OpenAI's Responses API through its own client, and its events as they are on the wire."""

from __future__ import annotations

import json
from itertools import chain
from typing import Annotated, Any, get_args

import httpx2 as httpx
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import Discriminator, TypeAdapter
from scripted import Scripted
from serving import ASKED, CITY, CONTEXT, KEY, named_events

from redrafter_mlx.engine.engine import Redrafter

PATH = "/v1/responses"
CALL = '<tool_call>{"name": "NAME", "arguments": ARGS}</tool_call>'
TOOL = {"type": "function", "name": "weather", "parameters": CITY}
EVENT = TypeAdapter(Annotated[get_args(ResponseStreamEvent)[0], Discriminator("type")])


def call(name: str, **given: object) -> str:
    return CALL.replace("NAME", name).replace("ARGS", json.dumps(given))


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def answer(url: str, writer: Scripted, says: str, /, **asked: object) -> list[dict[str, Any]]:
    """Return the events of a stream in which the model writes `says`, and check their form.

    The whole response without a stream must be the one at the end.
    """
    writer.script = lambda _: says
    body = {"model": "tiny", "input": ASKED, **asked}
    streamed = httpx.post(url + PATH, json={**body, "stream": True}, timeout=60)
    assert streamed.status_code == 200, streamed.text
    events = named_events(streamed.text)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    whole = httpx.post(url + PATH, json=body, timeout=60).json()
    last = events[-1]["response"]
    assert [without_ids(item) for item in whole["output"]] == [
        without_ids(item) for item in last["output"]
    ]
    assert whole["usage"] == last["usage"]
    return events


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, without `response.`, each once in a row."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if not i or names[i - 1] != name]


OPENING = ["created", "in_progress"]
ADDED, DONE = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]


def test_a_text_is_that_of_the_library_streamed_or_whole(
    client: openai.OpenAI, model: Redrafter
) -> None:
    want = model.generate(ASKED, max_tokens=30, temperature=1.2, seed=7, draft=False).text
    given = {"model": "tiny", "input": ASKED, "max_output_tokens": 30, "temperature": 1.2}
    extra = {"extra_body": {"seed": 7}}
    whole = client.responses.create(**given, **extra)
    with client.responses.stream(**given, **extra) as stream:
        events = list(stream)
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert events[-1].type == "response.incomplete"
    final = events[-1].response
    assert whole.output_text == "".join(texts) == final.output_text == want
    assert (whole.status, final.status) == ("incomplete", "incomplete")
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    plain = client.responses.create(
        **given, extra_body={"seed": 7, "x_redrafter": {"draft": False}}
    )
    assert plain.output_text == want


def test_a_stream_has_every_event_in_order(written: str, writer: Scripted) -> None:
    events = answer(written, writer, f"<think>hm</think>Well: {call('weather', city='Oslo')}",
                    tools=[TOOL])  # fmt: skip
    assert kinds(events) == [
        *OPENING,
        *ADDED, "reasoning_text.delta", "reasoning_text.done", *DONE,
        *ADDED, "output_text.delta", "output_text.done", *DONE,
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip
    reasoning, text, called = events[-1]["response"]["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert text["content"][0]["text"] == "Well: "
    assert (called["name"], json.loads(called["arguments"])) == ("weather", {"city": "Oslo"})
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == [reasoning, text, called]
    assert [e["output_index"] for e in events if e["type"] == "response.output_item.added"] == [
        0, 1, 2,
    ]  # fmt: skip


def test_usage_counts_cached_and_reasoning_tokens(written: str, writer: Scripted) -> None:
    writer.cached = 9
    events = answer(written, writer, "<think>four</think>so")
    usage = events[-1]["response"]["usage"]
    writer.cached = 0
    assert usage["input_tokens_details"] == {"cached_tokens": 9, "cache_write_tokens": 0}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 6}  # with both marks
    assert usage["output_tokens"] == 9
    assert usage["total_tokens"] == usage["input_tokens"] + 9


def test_an_answer_without_a_text_is_a_message(written: str, writer: Scripted) -> None:
    events = answer(written, writer, "")
    assert kinds(events) == [*OPENING, *ADDED, "output_text.done", *DONE, "completed"]


def test_tools_may_be_flat_in_namespaces_or_custom(written: str, writer: Scripted) -> None:
    """A namespace tells two tools of one name apart; what a host would run is left out."""
    tools = [
        TOOL,
        {"type": "namespace", "name": "mcp__sky__", "description": "Sky", "tools": [TOOL]},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark",
                                                      "definition": "start: /a+/"}},
        {"type": "web_search"},
    ]  # fmt: skip
    text = (
        call("weather", city="a") + call("mcp__sky__weather", city="b") + call("patch", input="aa")
    )
    events = answer(written, writer, text, tools=tools)
    flat, spaced, custom = events[-1]["response"]["output"]
    assert (flat["name"], flat.get("namespace")) == ("weather", None)
    assert (spaced["name"], spaced["namespace"]) == ("weather", "mcp__sky__")
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "aa")
    assert [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"] == [
        "aa"
    ]
    assert "start: /a+/" in writer.rendered[-1]
    assert "web_search" not in writer.rendered[-1]
    history = [*ASKED, *events[-1]["response"]["output"]]
    history += [
        {"type": f"{kind}_output", "call_id": item["call_id"], "output": f"out {i}"}
        for i, (item, kind) in enumerate(
            ((flat, "function_call"), (spaced, "function_call"), (custom, "custom_tool_call"))
        )
    ]
    answer(written, writer, "done", input=history, tools=tools)
    for i, (item, name) in enumerate(
        ((flat, "weather"), (spaced, "mcp__sky__weather"), (custom, "patch"))
    ):
        assert f'[{item["call_id"]} {{"name": "{name}", "arguments": ' in writer.rendered[-1]
        assert f"out {i}({item['call_id']})" in writer.rendered[-1]


def test_every_kind_of_item_reaches_the_model(written: str, writer: Scripted) -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"},
                                                        {"type": "input_text", "text": "V"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "local_shell_call", "id": "s", "call_id": "c1", "status": "completed",
         "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "c1", "output": "files"},
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "S"}],
         "encrypted_content": "another server's"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2",
         "output": [{"type": "input_text", "text": "rain"}]},
    ]  # fmt: skip
    answer(written, writer, "so", input=items, instructions="I")
    want = (
        "<|im_start|>system\nI<|im_end|>\n<|im_start|>system\nD<|im_end|>\n"
        "<|im_start|>user\nUV<|im_end|>\n"
        '<|im_start|>assistant\n<think>R</think>A[c1 {"name": "local_shell", "arguments": '
        '{"type": "exec", "command": ["ls"], "env": {}}}]<|im_end|>\n'
        "<|im_start|>tool\nfiles(c1)<|im_end|>\n"
        '<|im_start|>assistant\n<think>S</think>[c2 {"name": "weather", "arguments": {}}]<|im_end|>'
        "\n<|im_start|>tool\nrain(c2)<|im_end|>\n<|im_start|>assistant\n"
    )
    assert writer.rendered[-1] == want


def test_reasoning_comes_back_with_the_conversation(written: str, writer: Scripted) -> None:
    """Codex leaves out the text of reasoning, but returns what is called encrypted."""
    asked = {"include": ["reasoning.encrypted_content"]}
    events = answer(written, writer, "<think>hm é</think>so", **asked)
    reasoning, message = events[-1]["response"]["output"]
    del reasoning["content"]
    answer(written, writer, "x", input=[*ASKED, reasoning, message, *ASKED])
    assert "<think>hm é</think>so<|im_end|>" in writer.rendered[-1]
    assert "encrypted_content" not in answer(written, writer, "<think>a</think>b")[-1]["response"][
        "output"][0]  # fmt: skip


def test_a_format_is_enforced_by_a_grammar(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"format": {"type": "json_schema", "name": "s", "strict": True, "schema": schema}}
    given = {"model": "tiny", "input": ASKED, "max_output_tokens": 80}
    made = client.responses.create(**given, text=form)
    assert json.loads(made.output_text)["a"] in (1, 2)
    assert made.text is not None
    assert made.text.format is not None
    assert made.text.format.type == "json_schema"
    made = client.responses.create(**given, text={"format": {"type": "json_object"}})
    assert made.output_text.startswith("{")


def test_a_required_call_is_a_call(client: openai.OpenAI) -> None:
    tool = {**TOOL, "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}},
                                   "required": ["n"]}}  # fmt: skip
    for choice in (
        "required",
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required",
         "tools": [{"type": "function", "name": "weather"}]},
    ):  # fmt: skip
        made = client.responses.create(
            model="tiny", input="x", tools=[tool, {**tool, "name": "other"}] if choice != "required"
            else [tool], tool_choice=choice, max_output_tokens=200,
        )  # fmt: skip
        (item,) = made.output
        assert item.type == "function_call"
        assert item.name == "weather"
        assert json.loads(item.arguments)["n"] in (1, 2)


LOGPROBS = "message.output_text.logprobs"


def rounded(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return entries whose numbers equal those of another batch, which rounds differently."""
    near = [{**e, "logprob": pytest.approx(e["logprob"], abs=1e-4)} for e in entries]
    return [{**e, "top_logprobs": rounded(e.get("top_logprobs", []))} for e in near]


def test_log_probabilities_are_those_of_chat_completions_streamed_or_whole(
    client: openai.OpenAI,
) -> None:
    sampled = {"model": "tiny", "temperature": 1.2, "extra_body": {"seed": 7}}
    for drafts in (True, False):
        sampled["extra_body"] = {"seed": 7, "x_redrafter": {"draft": drafts}}
        chat = client.chat.completions.create(
            **sampled, messages=ASKED, max_tokens=30, logprobs=True, top_logprobs=3
        )
        want = chat.to_dict()["choices"][0]["logprobs"]["content"]
        given = {**sampled, "input": ASKED, "max_output_tokens": 30, "top_logprobs": 3}
        given["include"] = [LOGPROBS]
        whole = client.responses.create(**given).to_dict()
        with client.responses.stream(**given) as stream:
            events = [event.to_dict() for event in stream]
        ((part,),) = [item["content"] for item in whole["output"]]
        deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
        (done,) = [e for e in events if e["type"] == "response.output_text.done"]
        (final,) = events[-1]["response"]["output"]
        assert len(want) == 30
        assert [*chain(*deltas)] == done["logprobs"] == final["content"][0]["logprobs"]
        for entries in (part["logprobs"], done["logprobs"]):
            assert rounded(entries) == rounded(want)
        assert (part["text"], whole["top_logprobs"]) == (chat.choices[0].message.content, 3)
    given["top_logprobs"] = 0
    ((part,),) = [item["content"] for item in client.responses.create(**given).to_dict()["output"]]
    assert rounded(part["logprobs"]) == rounded([{**entry, "top_logprobs": []} for entry in want])
    given["include"] = []
    ((part,),) = [item["content"] for item in client.responses.create(**given).to_dict()["output"]]
    assert part["logprobs"] == []


def test_log_probabilities_are_those_of_the_tokens_of_texts(written: str, writer: Scripted) -> None:
    """Reasoning, calls and their marks have none; the end of the answer belongs to its text."""
    says = f"<think>hm so</think>It is. {call('weather', city='Oslo')}"
    for text, ended in ((says, ""), (says + "Well, done.", "<|im_end|>")):
        events = answer(written, writer, text, include=[LOGPROBS], top_logprobs=1, tools=[TOOL])
        items = events[-1]["response"]["output"]
        messages = [item["content"][0] for item in items if item["type"] == "message"]
        reported = ["".join(e["token"] for e in part["logprobs"]) for part in messages]
        assert "|".join(reported) == "|".join(part["text"] for part in messages) + ended
        for part in messages:
            assert {e["logprob"] for e in part["logprobs"]} == {0.0}
            assert [e["top_logprobs"][0]["token"] for e in part["logprobs"]] == [
                e["token"] for e in part["logprobs"]
            ]


def test_each_mistake_names_the_parameter(client: openai.OpenAI) -> None:
    strict = {**TOOL, "strict": True, "parameters": {"type": "object", "not": {}}}
    for param, changes in {
        "temperature": {"temperature": 2.5},
        "input": {"input": []},
        "input.0": {"input": [{"type": "item_reference", "id": "x"}]},
        "input.1": {"input": [*ASKED, {"type": "computer_call"}]},
        "input.2": {"input": [*ASKED, {**ASKED[0], "type": None}, {"type": {"a": 1}}]},
        "input.0.role": {"input": [{"role": "robot", "content": "x"}]},
        "input.0.content.0": {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "data:image/png;base64,"}]}]},
        "input.0.content.1": {"input": [{"role": "user", "content": [
            {"type": "input_text", "text": "x"}, {"type": "input_file", "file_id": "f"}]}]},
        "input.0.output.0": {"input": [{"type": "function_call_output", "call_id": "c",
                                        "output": [{"type": "input_image"}]}]},
        "previous_response_id": {"previous_response_id": "resp_1"},
        "conversation": {"conversation": "conv_1"},
        "background": {"background": True},
        "prompt": {"prompt": {"id": "pmpt_1"}},
        "top_logprobs": {"top_logprobs": 2},
        "text.format.schema": {"text": {"format": {"type": "json_schema", "name": "s"}}},
        "text.format.type": {"text": {"format": {"type": "xml"}}},
        "tools.1.parameters": {"tools": [{"type": "web_search"}, strict],
                               "tool_choice": "required"},
        "tools.0.tools.0.name": {"tools": [{"type": "namespace", "name": "n", "tools": [
            {**TOOL, "name": "a b"}]}]},
        "tool_choice": {"tool_choice": "required"},
        "max_output_tokens": {"max_output_tokens": 0},
        "x_redrafter.draft": {"extra_body": {"x_redrafter": {"draft": "no"}}},
    }.items():  # fmt: skip
        with pytest.raises(openai.BadRequestError) as bad:
            client.responses.create(**{"model": "tiny", "input": "x", **changes})  # type: ignore[call-overload]
        assert bad.value.param == param
        assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="gpt-none", input="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(model="tiny", input="x" * CONTEXT)
    assert (long.value.param, long.value.code) == ("input", "context_length_exceeded")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").responses.create(model="tiny", input="x")
    with pytest.raises(openai.APIStatusError) as large:
        client.responses.create(model="tiny", input="x" * 2**20)
    assert large.value.status_code == 413
    for method in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="stores no responses"):
            method("resp_1")


def test_what_is_ignored_is_named(
    written: str, writer: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "redrafter_mlx.server"):
        answer(written, writer, "x", store=True, prompt_cache_key="k", client_metadata={},
               truncation="auto", tools=[{"type": "web_search"}], text={"verbosity": "low"},
               service_tier="auto", user="me")  # fmt: skip
    assert f"{PATH}: ignored service_tier, truncation, tools.0 (web_search)" in caplog.messages


def test_a_failure_in_a_stream_is_its_last_event(written: str, writer: Scripted) -> None:
    def fail(_: str) -> str:
        raise RuntimeError("broken")

    writer.script = fail
    body = {"input": ASKED, "stream": True}
    text = httpx.post(written + PATH, json=body, timeout=60).text
    last = json.loads(text.strip().split("\n\n")[-1].split("\n")[1].removeprefix("data: "))
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    EVENT.validate_python(last)
    whole = httpx.post(written + PATH, json={"input": ASKED}, timeout=60)
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "server_error")
