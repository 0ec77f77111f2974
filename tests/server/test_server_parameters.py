"""Parameters of requests as clients of other servers send them, at the ends of their range."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from llguidance.hf import from_tokenizer
from serving import ready, tiny_redrafter

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.structured import grammar

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED = {"messages": [{"role": "user", "content": "hello hello"}], "max_tokens": 12}


@pytest.fixture(scope="module")
def url(model: Redrafter) -> Iterator[str]:
    with ready(model) as url:
        yield url


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def chat(url: str, **changes: object) -> str:
    text: str = post(url, CHAT, {**ASKED, **changes})["message"]["content"]
    return text


@pytest.mark.parametrize("changes", [{"temperature": 1e-8}, {"temperature": 1, "top_p": 0}])
def test_the_lower_ends_of_sampling_are_the_likeliest_tokens(
    url: str, changes: dict[str, object]
) -> None:
    assert chat(url, **changes) == chat(url)


def test_a_seed_of_minus_one_is_a_new_seed(url: str) -> None:
    given = {"temperature": 1.5, "max_tokens": 30}
    assert len({chat(url, seed=-1, **given) for _ in range(3)}) == 3
    assert len({chat(url, seed=-2, **given) for _ in range(3)}) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0, "top_p": 1, "min_p": 1, "top_k": 0},
        {"repetition_penalty": 0, "presence_penalty": 0, "frequency_penalty": 0},
        {"stop": ""}, {"stop": []}, {"stop": None}, {"stop": [""]},
        {"seed": 2**63}, {"seed": 2**64 - 1}, {"seed": -(2**63)},
        {"logit_bias": {}}, {"logit_bias": None}, {"n": 1, "logprobs": False},
    ],
)  # fmt: skip
def test_values_that_change_nothing_change_nothing(url: str, changes: dict[str, object]) -> None:
    assert chat(url, **changes) == chat(url)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 2, "top_p": 1e-9}, {"temperature": 2, "min_p": 1},
        {"presence_penalty": 2, "frequency_penalty": 2},
        {"presence_penalty": -2, "frequency_penalty": -2},
        {"repetition_penalty": 2}, {"logit_bias": {"5": -100, "6": 100}},
        {"logprobs": True, "top_logprobs": 0}, {"logprobs": True, "top_logprobs": 20},
        {"max_tokens": -1, "max_completion_tokens": 3},
    ],
)  # fmt: skip
def test_both_ends_of_a_range_are_answered(url: str, changes: dict[str, object]) -> None:
    assert chat(url, **changes) is not None


@pytest.mark.parametrize(("given", "count"), [(0, 0), (20, 20), (True, 0), (False, None)])
def test_a_completion_reports_as_many_alternatives_as_asked(
    url: str, given: object, count: int | None
) -> None:
    found = post(url, TEXT, {"prompt": "ab", "max_tokens": 2, "logprobs": given})["logprobs"]
    assert (found and [len(top) for top in found["top_logprobs"]]) == (
        None if count is None else [count] * 2
    )


def test_a_token_of_probability_zero_has_a_log_probability_that_json_can_write(url: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": 7}}}
    given = {"prompt": "ab", "max_tokens": 1, "logprobs": 3, "response_format": schema}
    top = post(url, TEXT, given)["logprobs"]["top_logprobs"][0]
    assert min(top.values()) == -9999.0


def test_a_body_may_begin_with_a_byte_order_mark(url: str) -> None:
    body = b"\xef\xbb\xbf" + json.dumps(ASKED).encode()
    assert httpx.post(url + CHAT, content=body, timeout=60).status_code == 200


def status_of(url: str, target: str, name: str) -> int:
    """Return the status of a GET of a target, written as it is, with this Host header."""
    where, port = url.removeprefix("http://").split(":")
    with socket.create_connection((where, int(port)), timeout=30) as connection:
        head = f"GET {target} HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode())
        return int(connection.makefile("rb").readline().split()[1])


@pytest.mark.parametrize(
    ("target", "name", "status"),
    [
        ("http://localhost/v1/models", "localhost", 200),
        ("HTTP://127.0.0.1:9//v1/models?a=http://b/c", "localhost", 200),
        ("http://localhost", "evil.example", 200),
        ("http://evil.example/v1/models", "localhost", 403),
        ("http://localhost/v1/nothing", "localhost", 404),
    ],
)
def test_a_target_in_absolute_form_is_its_path_and_its_host(
    url: str, target: str, name: str, status: int
) -> None:
    assert status_of(url, target, name) == status


def test_an_absolute_target_needs_the_key_that_its_path_needs() -> None:
    with ready(tiny_redrafter(), api_key="k") as url:
        assert status_of(url, "http://localhost/v1/models", "localhost") == 401
        assert status_of(url, "http://localhost/health", "localhost") == 200


def test_structured_output_is_prepared_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For 262,000 tokens that takes seconds."""
    prepared = []

    def counted(*args: Any) -> Any:
        prepared.append(args)
        return from_tokenizer(*args)

    monkeypatch.setattr(grammar, "from_tokenizer", counted)
    with ready(tiny_redrafter()) as url:
        assert len(prepared) == 1
        assert chat(url, response_format={"type": "json_object"}, max_tokens=1)
        assert len(prepared) == 1


def test_a_model_that_grammars_cannot_use_is_served_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no such vocabulary")

    monkeypatch.setattr(grammar, "from_tokenizer", refuse)
    with ready(tiny_redrafter()) as url:
        assert chat(url, logprobs=True)
        for path, asked in ((CHAT, ASKED), (TEXT, {"prompt": "ab"})):
            body = {**asked, "response_format": {"type": "json_object"}}
            answer = httpx.post(url + path, json=body, timeout=60)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
            assert "no such vocabulary" in answer.json()["error"]["message"]


def test_a_completion_has_the_format_that_was_asked_for(url: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    given = {"prompt": "ab", "max_tokens": 60, "response_format": form}
    for n in (1, 2):
        assert json.loads(post(url, TEXT, {**given, "n": n})["text"])["a"] in (1, 2)
    impossible = {"type": "integer", "minimum": 2, "maximum": 1}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": impossible}}
    answer = httpx.post(url + TEXT, json={**given, "response_format": form}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
