"""Tool calls in a model's own form, through the server: whole answers and streams."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import openai
import pytest
from mlx_lm.tool_parsers import glm47, minimax_m2, mistral, qwen3_coder
from serving import ready
from tiny import CHAT_TEMPLATE, byte_model, marked_tokenizer

from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.request import Request
from redrafter_mlx.response import Response

TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
PROPERTIES = {
    "id": {"type": "integer"},
    "num": {"type": "number"},
    "text": {"type": "string"},
    "opt": {"type": ["string", "null"]},
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}},
}


class Scripted(Redrafter):
    """A model that answers with a text of ours, in pieces, and ends as we say."""

    pieces: tuple[str, ...] = ()
    reason = "stop"

    async def arespond(self, request: Request) -> AsyncGenerator[Response, None]:
        one = replace(request, options=replace(request.options, max_tokens=1))
        async with contextlib.aclosing(super().arespond(one)) as responses:
            (token,) = [response async for response in responses]
        for number, piece in enumerate(self.pieces, start=1):
            ends = self.reason if number == len(self.pieces) else None
            yield replace(token, text=piece, finish_reason=ends, generation_tokens=number)


def scripted(parser: Any) -> Scripted:
    tokenizer = marked_tokenizer(parser, TEMPLATE)
    return Scripted(
        byte_model(0, max_position_embeddings=2048), tokenizer, host_drafters=(Lookup(),)
    )


MODELS = {
    module.__name__.rpartition(".")[2]: partial(scripted, module)
    for module in (qwen3_coder, glm47, minimax_m2, mistral)
}


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, tuple[Scripted, openai.OpenAI]]]:
    with contextlib.ExitStack() as servers:
        found = {}
        for name, make in MODELS.items():
            model = make()
            url = servers.enter_context(ready(model))
            found[name] = model, openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        yield found


def qwen(key: str, value: str) -> str:
    parameter = f"<parameter={key}>\n{value}\n</parameter>"
    return f"<tool_call>\n<function=f>\n{parameter}\n</function>\n</tool_call>"


def glm(key: str, value: str) -> str:
    pair = f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"
    return f"<tool_call>f\n{pair}\n</tool_call>"


def minimax(key: str, value: str) -> str:
    parameter = f'<parameter name="{key}">{value}</parameter>'
    invoked = f'<invoke name="f">\n{parameter}\n</invoke>'
    return f"<minimax:tool_call>\n{invoked}\n</minimax:tool_call>"


def answers(
    model: Scripted, client: openai.OpenAI, text: str, reason: str = "stop"
) -> tuple[list[dict[str, Any]], str, str]:
    """Return calls' arguments, content and finish reason: the same whole and in any stream."""
    rng = random.Random(0)
    given = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
    found = []
    for pieces in (1, 4, len(text)):
        cuts = sorted(rng.sample(range(1, len(text)), pieces - 1))
        cut = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        model.pieces, model.reason = tuple(cut), reason
        (choice,) = client.chat.completions.create(**given).choices
        calls = choice.message.tool_calls or []
        assert all(call.function.name == "f" for call in calls)
        content = choice.message.content or ""
        found.append(([c.function.arguments for c in calls], content, choice.finish_reason))
        chunks = [c.choices[0] for c in client.chat.completions.create(**given, stream=True)]
        streamed = [call for c in chunks for call in c.delta.tool_calls or []]
        assert [call.index for call in streamed] == list(range(len(streamed)))
        content = "".join(c.delta.content or "" for c in chunks)
        last = chunks[-1].finish_reason
        found.append(([c.function.arguments for c in streamed], content, last))
    assert all(one == found[0] for one in found)
    return [json.loads(arguments) for arguments in found[0][0]], *found[0][1:]


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        ("qwen3_coder", qwen("id", "1234567890123456789"), {"id": 1234567890123456789}),
        ("qwen3_coder", qwen("text", "one </parameter> two"), {"text": "one </parameter> two"}),
        ("glm47", glm("text", "one </tool_call> two"), {"text": "one </tool_call> two"}),
        ("qwen3_coder", qwen("opt", "123"), {"opt": "123"}),
        ("qwen3_coder", qwen("opt", "null"), {"opt": None}),
        ("qwen3_coder", qwen("text", "null"), {"text": "null"}),
        ("minimax_m2", minimax("text", "null"), {"text": "null"}),
        ("minimax_m2", minimax("text", " \n x "), {"text": " \n x "}),
        ("qwen3_coder", qwen("id", "2026-01-15"), {"id": "2026-01-15"}),
        ("qwen3_coder", qwen("num", "1e400"), {"num": "1e400"}),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"id": 1}', {"id": 1}),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"text": "[TOOL_CALLS]"}', {"text": "[TOOL_CALLS]"}),
    ],
)
def test_a_call_holds_what_the_model_wrote_in_the_types_of_the_schema(
    served: dict[str, tuple[Scripted, openai.OpenAI]],
    form: str,
    text: str,
    arguments: dict[str, object],
) -> None:
    assert answers(*served[form], text) == ([arguments], "", "tool_calls")


@pytest.mark.parametrize("lacks", ["\n</tool_call>", "_call>", "\n</function>\n</tool_call>"])
def test_a_call_whose_end_mark_is_missing_at_the_end_of_the_answer_is_a_call(
    served: dict[str, tuple[Scripted, openai.OpenAI]], lacks: str
) -> None:
    text = qwen("text", "Rome").removesuffix(lacks)
    assert answers(*served["qwen3_coder"], text) == ([{"text": "Rome"}], "", "tool_calls")


def test_a_call_cut_by_length_is_a_call_only_if_all_of_it_is_there(
    served: dict[str, tuple[Scripted, openai.OpenAI]],
) -> None:
    whole = qwen("text", "Rome").removesuffix("\n</tool_call>")
    assert answers(*served["qwen3_coder"], whole, "length") == (
        [{"text": "Rome"}],
        "",
        "tool_calls",
    )
    for form, text in (
        ("qwen3_coder", whole.removesuffix("\n</function>")),
        ("glm47", glm("text", "Rome").removesuffix("\n</tool_call>")),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"text": "Ro'),
    ):
        assert answers(*served[form], text, "length") == ([], text, "length")


def test_text_around_calls_stays_content(served: dict[str, tuple[Scripted, openai.OpenAI]]) -> None:
    text = f"Well: {qwen('id', '1')} and {qwen('id', '2')}\n\nso <tool_call> it is"
    assert answers(*served["qwen3_coder"], text) == (
        [{"id": 1}, {"id": 2}],
        "Well: and so <tool_call> it is",
        "tool_calls",
    )


def test_the_models_own_id_of_a_call_is_its_id(
    served: dict[str, tuple[Scripted, openai.OpenAI]],
) -> None:
    """New ids of Mistral's have the nine characters that its templates insist on."""
    model, client = served["mistral"]
    given = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
    model.reason = "stop"
    model.pieces = ('[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"id": 1}[TOOL_CALLS]f[ARGS]{"id": 2}',)
    (choice,) = client.chat.completions.create(**given).choices
    own, new = choice.message.tool_calls or []
    assert own.id == "abc123def"
    assert new.id.isalnum()
    assert len(new.id) == 9
