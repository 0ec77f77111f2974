"""What holds of every API alike: who may ask, and streams in which nothing happens."""

from __future__ import annotations

import json

import httpx2 as httpx
import pytest
from serving import ASKED, KEY, hold, ready, tiny_redrafter
from waiting import wait_for

from redrafter_mlx.server.answers import sse

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SILENT = {
    CHAT: ({"messages": ASKED}, [{"role": "assistant", "content": ""}, *[{}] * 4]),
    MESSAGES: ({"messages": ASKED, "max_tokens": 9}, ["message_start", *["ping"] * 4]),
    RESPONSES: ({"input": ASKED}, ["response.created", *["response.in_progress"] * 4]),
}
"""Of each API a request, and how the events of its stream begin if no token comes."""


@pytest.mark.parametrize("path", [CHAT, MESSAGES, f"{MESSAGES}/count_tokens", RESPONSES])
@pytest.mark.parametrize("name", ["Host", "Origin"])
def test_web_pages_and_other_hosts_are_refused(url: str, path: str, name: str) -> None:
    evil = {"Host": "evil.example", "Origin": "http://evil.example"}[name]
    headers = {name: evil, "Authorization": f"Bearer {KEY}"}
    sent = httpx.post(url + path, json={}, headers=headers, timeout=60)
    assert sent.status_code == 403
    if path.startswith(MESSAGES):
        assert sent.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize("path", SILENT)
def test_a_silent_stream_gets_events_and_ends_when_its_client_leaves(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "HEARTBEAT_SECONDS", 0.05)
    model = tiny_redrafter()
    held = hold(model, 0)
    body, begins = SILENT[path]
    with ready(model) as url:
        asked = {**body, "stream": True}
        with httpx.stream("POST", url + path, json=asked, timeout=60) as streamed:
            lines = (line for line in streamed.iter_lines() if line.startswith("data: "))
            events = [json.loads(next(lines).removeprefix("data: ")) for _ in range(5)]
        shown = [e["type"] if "type" in e else e["choices"][0]["delta"] for e in events]
        assert shown == begins
        wait_for(lambda: held.begun == held.ended == 1)
