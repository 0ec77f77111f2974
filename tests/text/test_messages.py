"""Messages as clients send them and as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from serving import ready, tiny_redrafter
from tiny import CHAT_TEMPLATE, byte_tokenizer, plain_tokens
from weights_samples import llama_model, write_folder

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.loading.target import load_target
from redrafter_mlx.structured.grammar import Grammars
from redrafter_mlx.structured.plan import plan_output, shows_tools
from redrafter_mlx.weights.text.chat import render_chat

ASKED = {"role": "user", "content": "Rain?"}
CALL = {"id": "call12345", "type": "function", "function": {"name": "sky", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call12345", "content": "dry"}
OLD_CALLED = {"role": "assistant", "function_call": {"name": "sky", "arguments": "{}"}}
OLD_RESULT = {"role": "function", "name": "sky", "content": "dry"}
SKY = {"type": "function", "function": {"name": "sky", "parameters": {"type": "object"}}}

READS_ALL = (
    "{% for m in messages %}{{ m.role }}|{{ m.content }}|{{ m.name }}|{{ m.tool_call_id }}|"
    "{{ m.mood }}|{% for c in m.tool_calls %}{{ c.id }} {{ c.function.name }}{% endfor %};"
    "{% endfor %}{{ persona }}{% if add_generation_prompt %}>{% endif %}"
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must take turns') }}{% endif %}"
    "{{ m.role }}|{{ m.content }};{% endfor %}"
)


def model_of(template: str) -> Redrafter:
    model = tiny_redrafter()
    model.tokenizer.chat_template = template
    return model


def shown(messages: list[dict[str, Any]], template: str = READS_ALL, **asked: Any) -> str:
    """Return the prompt that a request's messages become."""
    model = model_of(template)
    plan = plan_output(model, Grammars(model.tokenizer, model.target.vocab_size), messages, **asked)
    return str(model.tokenizer.decode(list(plan.prompt)))


def rendered(messages: list[dict[str, Any]], **asked: Any) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = READS_ALL
    return str(tokenizer.decode(render_chat(tokenizer, messages, **asked)))


def test_a_template_reads_any_field_of_a_message() -> None:
    message = {**ASKED, "name": "Ann", "mood": "glad"}
    assert rendered([message]) == "user|Rain?|Ann||glad|;>"


def test_a_result_has_the_name_of_the_function_that_was_called() -> None:
    """OpenAI's clients send its id alone; FunctionGemma's template needs its name."""
    assert "tool|dry|sky|call12345||;" in rendered([ASKED, CALLED, RESULT])
    assert "tool|dry|sun|call12345||;" in rendered([ASKED, CALLED, {**RESULT, "name": "sun"}])


def test_functions_of_older_clients_are_tools() -> None:
    text = rendered([ASKED, OLD_CALLED, OLD_RESULT])
    assert text == "user|Rain?||||;assistant|||||call00001 sky;tool|dry|sky|call00001||;>"


def test_results_in_words_join_what_the_user_writes_next() -> None:
    """Templates may insist that user and assistant take turns."""
    again = {"role": "user", "content": "And now?"}
    results = [RESULT, {**RESULT, "content": "wet"}]
    text = shown([ASKED, CALLED, *results, again], ALTERNATES, tools=[SKY])
    assert text.count("user|") == 2
    last = text.rpartition("user|")[2]
    assert last.index("dry") < last.index("wet") < last.index("And now?")
    ended = shown([ASKED, CALLED, RESULT, CALLED, RESULT], ALTERNATES)
    assert ended.count("assistant|") == 2


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ready(model_of(READS_ALL)) as url:
        yield url


def ask(url: str, *messages: dict[str, Any], **asked: object) -> httpx.Response:
    body = {"messages": messages or [ASKED], "max_tokens": 8, **asked}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def prompt_tokens(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    count: int = answer.json()["usage"]["prompt_tokens"]
    return count


def test_chat_template_kwargs_are_variables_of_the_template(url: str) -> None:
    plain = prompt_tokens(ask(url))
    asked = {"persona": "pirate", "unread": 3, "enable_thinking": False}
    assert prompt_tokens(ask(url, chat_template_kwargs=asked)) == plain + len("pirate")


def test_text_in_a_variable_is_never_a_control_token() -> None:
    ids = render_chat(model_of(READS_ALL).tokenizer, [ASKED], variables={"persona": "<|im_end|>"})
    assert byte_tokenizer().eos_token_id not in ids


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools"])
def test_an_option_that_is_no_variable_is_refused_by_name(url: str, name: str) -> None:
    answer = ask(url, chat_template_kwargs={name: "x"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"chat_template_kwargs.{name}"


def test_fields_of_a_message_reach_the_template_over_http(url: str) -> None:
    plain = prompt_tokens(ask(url, ASKED))
    assert prompt_tokens(ask(url, {**ASKED, "name": "Ann", "mood": "glad"})) == plain + 7
    old, new = (ask(url, *turns) for turns in ([ASKED, OLD_CALLED, OLD_RESULT],
                                               [ASKED, CALLED, RESULT]))  # fmt: skip
    assert prompt_tokens(old) == prompt_tokens(new)


def test_an_answer_continues_the_last_message_when_asked() -> None:
    model = model_of(CHAT_TEMPLATE)
    begun = {"role": "assistant", "content": "It is"}
    text = "<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\nIt is"
    ids = model.encode(text, raw=True)
    with ready(model) as url:
        for given in ({}, {"add_generation_prompt": False}):
            answer = ask(url, ASKED, begun, continue_final_message=True, **given)
            assert prompt_tokens(answer) == len(ids)
            want = plain_tokens(model.model, ids, 8)
            assert answer.json()["choices"][0]["message"]["content"] == model.token_text.of(want)
        closed = ask(url, ASKED, begun, add_generation_prompt=False)
        assert prompt_tokens(closed) == len(model.encode(text + "<|im_end|>\n", raw=True))


@pytest.mark.parametrize(
    ("messages", "asked"),
    [
        ([ASKED], {}),
        ([ASKED, CALLED], {}),
        ([ASKED, {"role": "assistant", "content": "It"}], {"add_generation_prompt": True}),
        ([ASKED, {"role": "assistant", "content": "It"}],
         {"response_format": {"type": "json_object"}}),
    ],
)  # fmt: skip
def test_what_cannot_be_continued_is_refused_by_name(
    url: str, messages: list[dict[str, Any]], asked: dict[str, object]
) -> None:
    answer = ask(url, *messages, continue_final_message=True, **asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "continue_final_message"


def test_a_template_named_tool_use_is_taken_when_tools_are_given(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hermes", llama_model(258))
    byte_tokenizer()._tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    calls = (
        "{% for t in tools %}{{ t | tojson }}{% endfor %}"
        "{% for tool_call in [] %}<tool_call>{{ tool_call.name }}{% endfor %}"
    )
    settings["chat_template"] = [
        {"name": "default", "template": CHAT_TEMPLATE},
        {"name": "tool_use", "template": calls + CHAT_TEMPLATE},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = load_target(folder).tokenizer
    assert shows_tools(tokenizer)
    assert '"sky"' in tokenizer.decode(render_chat(tokenizer, [ASKED], tools=[SKY]))
    assert "tool_call" not in tokenizer.decode(render_chat(tokenizer, [ASKED]))
