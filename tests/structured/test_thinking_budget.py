"""A limit on the reasoning: the mark at its end is forced, with drafts as without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from scripted import MARKS, TEMPLATE, marked_tokenizer
from serving import AlwaysDrafting, ready
from tiny import random_model

from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.request import Request
from redrafter_mlx.structured.grammar import Grammars
from redrafter_mlx.structured.plan import plan_output

ASKED = [{"role": "user", "content": "hello hello hello hello"}]
BEGUN = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


def thinker(template: str) -> Redrafter:
    tokenizer = marked_tokenizer("json_tools", template)
    model = random_model(seed=3, vocab_size=len(tokenizer), max_position_embeddings=4096)
    return AlwaysDrafting(model, tokenizer, host_drafters=(Lookup(),))


@pytest.fixture(scope="module", params=[BEGUN, TEMPLATE], ids=["begun", "begins itself"])
def model(request: pytest.FixtureRequest) -> Redrafter:
    return thinker(request.param)


def tokens(
    model: Redrafter, budget: int | None, *, draft: bool, count: int = 60, **asked: Any
) -> list[int]:
    """Return the tokens of an answer whose reasoning never ends by itself.

    A model that is to begin it itself does so at once.
    """
    grammars = Grammars(model.tokenizer, model.target.vocab_size)
    start, end = (grammars.token_of(mark) for mark in MARKS)
    assert start is not None
    assert end is not None
    plan = plan_output(model, grammars, ASKED, thinking_budget=budget, **asked)
    prompt = plan.prompt
    if plan.markup.initial_state != "reasoning":
        first = Request(prompt, GenerationOptions(max_tokens=1, logit_bias=((start, 100.0),)))
        assert [response.token for response in model.respond(first)] == [start]
    bias = ((end, -100.0), (start, -100.0))
    options = GenerationOptions(max_tokens=count, logit_bias=bias, draft=draft)
    constraint = plan.constraint()
    if plan.markup.initial_state != "reasoning":
        prompt = (*prompt, start)
        if constraint is not None:
            constraint.advance(start)
    chosen = model.chosen_options(options, {})
    return [r.token for r in model.respond(Request(prompt, chosen, constraint))]


@pytest.mark.parametrize("budget", [0, 1, 17])
def test_reasoning_ends_at_its_limit_with_drafts_as_without(model: Redrafter, budget: int) -> None:
    free = tokens(model, None, draft=False)
    plain = tokens(model, budget, draft=False)
    end = Grammars(model.tokenizer, model.target.vocab_size).token_of(MARKS[1])
    assert plain[:budget] == free[:budget]
    assert plain[budget] == end
    assert end not in plain[budget + 1 :]
    assert tokens(model, budget, draft=True) == plain


def test_a_limit_that_is_not_reached_changes_nothing(model: Redrafter) -> None:
    assert tokens(model, 1000, draft=True) == tokens(model, None, draft=False)


def test_a_format_follows_the_reasoning_that_was_ended(model: Redrafter) -> None:
    made = tokens(model, 5, draft=True, count=200, response_format=FORMAT)
    text = model.tokenizer.decode(made[6:-1] if made[-1] in model.tokenizer.eos_token_ids
                                  else made[6:])  # fmt: skip
    assert json.loads(text)["a"] in (1, 2)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ready(thinker(BEGUN)) as url:
        yield url


@pytest.mark.parametrize(
    ("path", "asked", "counted"),
    [
        ("/v1/chat/completions",
         {"messages": ASKED, "max_tokens": 60, "thinking_token_budget": 7},
         ("completion_tokens_details", "reasoning_tokens")),
        ("/v1/chat/completions",
         {"messages": ASKED, "max_tokens": 60, "thinking_budget": 7},
         ("completion_tokens_details", "reasoning_tokens")),
        ("/v1/responses",
         {"input": ASKED, "max_output_tokens": 60, "thinking_budget_tokens": 7},
         ("output_tokens_details", "reasoning_tokens")),
        ("/v1/messages",
         {"messages": ASKED, "max_tokens": 60,
          "thinking": {"type": "enabled", "budget_tokens": 7}}, ()),
    ],
)  # fmt: skip
def test_every_api_has_the_limit(
    url: str, path: str, asked: dict[str, Any], counted: tuple[str, ...]
) -> None:
    bias = {str(token): -100 for token in (256, 257, 258)}  # marks and the end of the text
    answer = httpx.post(url + path, json={**asked, "logit_bias": bias}, timeout=60).json()
    if counted:
        assert answer["usage"][counted[0]][counted[1]] == 8  # with the mark
    else:
        thinking, text = answer["content"]
        assert (thinking["type"], text["type"]) == ("thinking", "text")
        assert len(thinking["thinking"]) <= 7
