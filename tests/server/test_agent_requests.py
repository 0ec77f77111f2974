"""Requests that Codex, Claude Code and opencode sent, as `agents.py` recorded them.

In each conversation the agent runs a shell command and edits a file, says so, and is asked again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from places import SUPPORT
from scripted import Scripted
from serving import host
from starlette.testclient import TestClient
from waiting import wait_for

from redrafter_mlx.server.app import create_app
from redrafter_mlx.server.hosting import ModelHost
from redrafter_mlx.server.models import Models
from redrafter_mlx.server.options import ServerOptions

RECORDED = SUPPORT / "servers" / "requests"
IGNORED = {
    "claude": "/v1/messages: ignored context_management",
    "codex": "/v1/responses: ignored tools.8 (web_search)",
    "opencode": None,
}


def recorded(agent: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the paths and bodies of an agent's requests that have tools, in order."""
    requests = json.loads((RECORDED / f"{agent}.json").read_text(encoding="utf-8"))
    tools = requests[0]["tools"]
    return [
        (request["path"], {**request["body"], "tools": tools})
        for request in requests
        if "tools" in request["body"]
    ]


@pytest.fixture(scope="module")
def api(writer: Scripted) -> Iterator[TestClient]:
    with TestClient(create_app(Models([host(writer)]), ServerOptions()), "http://127.0.0.1") as api:
        wait_for(lambda: api.get("/health").status_code == 200)
        yield api


@pytest.mark.parametrize("agent", IGNORED)
def test_a_recorded_conversation_is_answered_to_its_end(
    api: TestClient, writer: Scripted, agent: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each prompt begins with the one before, so that only what is new is read."""
    writer.script = lambda _: "All done, friend."
    writer.rendered.clear()
    conversation = recorded(agent)
    with caplog.at_level("INFO", "redrafter_mlx.server"):
        for path, body in conversation:
            answer = api.post(path, json=body)
            assert answer.status_code == 200
            assert "All done, friend." in said(answer.text)
    for before, after in zip(writer.rendered, writer.rendered[1:], strict=False):
        assert after.startswith(before)
    assert "found-it-1234" in writer.rendered[1], "the command's output"
    assert "the new line" in writer.rendered[-2], "the edit"
    assert "All done, friend.<|im_end|>\n<|im_start|>user\n" in writer.rendered[-1]
    ignored = {message for message in caplog.messages if "ignored" in message}
    assert ignored == {IGNORED[agent]} - {None}


@pytest.mark.parametrize("agent", IGNORED)
def test_with_two_models_each_request_is_answered_by_the_one_that_it_names(agent: str) -> None:
    """Two agents of a kind, each with a model of its own, whose requests come in turns."""
    writers = {name: Scripted() for name in ("one", "two")}
    hosts = []
    for name, model in writers.items():
        model.script = lambda _, name=name: f"All done by {name}."  # type: ignore[misc]
        hosts.append(ModelHost(name, lambda model=model: model, starting=True))  # type: ignore[misc]
    with TestClient(create_app(Models(hosts), ServerOptions()), "http://127.0.0.1") as api:
        wait_for(lambda: api.get("/health").status_code == 200)
        conversation = recorded(agent)
        for path, body in conversation:
            for name in writers:
                answer = api.post(path, json={**body, "model": name})
                assert answer.status_code == 200
                assert f"All done by {name}." in said(answer.text)
    assert writers["one"].rendered == writers["two"].rendered
    assert len(writers["one"].rendered) == len(conversation)


def said(stream: str) -> str:
    """Return all texts of a stream's events, one after the other."""
    texts = []
    for line in stream.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            delta = event.get("delta") or (event.get("choices") or [{}])[0].get("delta") or ""
            texts.append(delta if isinstance(delta, str) else delta.get("text")
                         or delta.get("content") or "")  # fmt: skip
    return "".join(texts)


def test_a_line_that_changes_with_the_session_is_in_no_prompt(
    api: TestClient, writer: Scripted
) -> None:
    path, body = recorded("claude")[0]
    assert body["system"][0]["text"].startswith("x-anthropic-billing-header")
    writer.script = lambda _: "x"
    prompts = []
    for version in ("1", "2"):
        body["system"][0]["text"] = f"x-anthropic-billing-header: cc_version={version}"
        assert api.post(path, json=body).status_code == 200
        prompts.append(writer.rendered[-1])
    assert prompts[0] == prompts[1]
    assert "billing" not in prompts[0]
