"""Tool calls in every form that mlx-lm's parsers know, through a stream of every API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from scripted import TEMPLATE, Scripted, marked_tokenizer
from serving import host
from starlette.testclient import TestClient
from tool_writers import TOOLS, WRITERS, Writer
from waiting import wait_for

from redrafter_mlx.server.app import create_app
from redrafter_mlx.server.models import Models
from redrafter_mlx.server.options import ServerOptions

ARGUMENTS = {
    "string": 'a "quoted"\n<b> é',
    "integer": 12345678901234567890,
    "array": ["x", 1],
    "object": {"k": True},
    "boolean": False,
}
FORMS = pytest.mark.parametrize(
    ("form", "write"), WRITERS, ids=[f"{form}-{i}" for i, (form, _) in enumerate(WRITERS)]
)
Read = Callable[[Mapping[str, Any]], tuple[str, list[tuple[str, str]]]]
"""Returns the text in one event of a stream, and the pieces of calls: name and arguments."""


def of_chat(event: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    deltas = [choice["delta"] for choice in event["choices"]]
    functions = [c["function"] for d in deltas for c in d.get("tool_calls", [])]
    found = [(function["name"], function["arguments"]) for function in functions]
    return "".join(d.get("content") or "" for d in deltas), found


def of_responses(event: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    if event["type"] == "response.function_call_arguments.done":
        return "", [(event["name"], event["arguments"])]
    return event["delta"] if event["type"] == "response.output_text.delta" else "", []


def of_messages(event: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    block, delta = event.get("content_block", {}), event.get("delta", {})
    if block.get("type") == "tool_use":
        return "", [(block["name"], "")]
    if delta.get("type") == "input_json_delta":
        return "", [("", delta["partial_json"])]
    return delta.get("text", ""), []


def functions(**changes: str) -> list[dict[str, Any]]:
    """Return the tools with the names that an API has for a function's fields."""
    return [
        {
            changes.get(key, key): value
            for key, value in {"parameters": {}, **tool["function"]}.items()
        }
        for tool in TOOLS
    ]


USER = [{"role": "user", "content": "x"}]
APIS: dict[str, tuple[dict[str, Any], Read]] = {
    "/v1/chat/completions": ({"messages": USER, "tools": TOOLS}, of_chat),
    "/v1/responses": (
        {"input": "x", "tools": [{"type": "function", **tool} for tool in functions()]},
        of_responses,
    ),
    "/v1/messages": (
        {"messages": USER, "max_tokens": 9999, "tools": functions(parameters="input_schema")},
        of_messages,
    ),
}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Scripted, TestClient]]:
    model = Scripted()
    with TestClient(create_app(Models([host(model)]), ServerOptions()), "http://127.0.0.1") as api:
        wait_for(lambda: api.get("/health").status_code == 200)
        yield model, api


@pytest.fixture
def model(served: tuple[Scripted, TestClient], form: str) -> Scripted:
    """The served model, which writes calls in this form."""
    served[0].tokenizer = marked_tokenizer(form, TEMPLATE)
    return served[0]


@pytest.fixture
def api(served: tuple[Scripted, TestClient]) -> TestClient:
    return served[1]


def streamed(api: TestClient, path: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the text of a stream, and its calls."""
    asked, read = APIS[path]
    answer = api.post(path, json={**asked, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    parts = [read(json.loads(line.removeprefix("data: "))) for line in lines]
    calls: list[tuple[str, str]] = []
    for name, arguments in (piece for _, found in parts for piece in found):
        if name:
            calls.append((name, arguments))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + arguments)
    return "".join(text for text, _ in parts), calls


@pytest.mark.parametrize("path", APIS)
@FORMS
def test_a_call_is_whole_and_never_text(
    model: Scripted, api: TestClient, write: Writer, path: str
) -> None:
    """The model writes three tokens at a time, so that marks come in pieces."""
    model.script = lambda _: f"Well {write('f.x-y', ARGUMENTS)}"
    text, calls = streamed(api, path)
    assert text == "Well "
    assert [(name, json.loads(given)) for name, given in calls] == [("f.x-y", ARGUMENTS)]


@pytest.mark.parametrize("path", APIS)
@FORMS
def test_calls_follow_one_another(
    model: Scripted, api: TestClient, write: Writer, path: str
) -> None:
    """A call without arguments has an empty object, not an empty text."""
    model.script = lambda _: write("g", {}) + "\n" + write("f.x-y", {"string": "b"})
    text, calls = streamed(api, path)
    assert text == ""
    assert [(name, json.loads(given)) for name, given in calls] == [
        ("g", {}),
        ("f.x-y", {"string": "b"}),
    ]
