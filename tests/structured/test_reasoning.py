"""Reasoning comes before calls and formats, and is told apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
from output_plans import (
    ASKED,
    CALL,
    CLOCK,
    THINKING,
    answered,
    grammars,
    merged,
    model,
    plan,
    tool,
    written,
)

from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.structured.json_schema import json_term
from redrafter_mlx.structured.output_grammar import answer_grammar


@pytest.mark.parametrize("said", ["a <think> b", "<think>", "</think> <think>\n"])
def test_a_mark_of_reasoning_in_a_message_begins_none(said: str) -> None:
    asked = [{"role": "user", "content": said}]
    made = plan(model(), asked, response_format={"type": "json_object"})
    assert made.markup.initial_state == "normal"
    thinks = plan(model(THINKING), asked, thinking=True)
    assert thinks.markup.initial_state == "reasoning"


def test_reasoning_that_the_template_begins_is_told_apart_and_the_format_comes_after_it() -> None:
    of_model = model(THINKING)
    end = of_model.tokenizer.convert_tokens_to_ids("</think>")
    schema = tool("x", a={"enum": [1, 2]})["function"]["parameters"]
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    made = plan(of_model, ASKED, response_format=asked, thinking=True)
    options = {"max_tokens": 200, "temperature": 1.0, "seed": 2, "logit_bias": {end: 5.0}}
    runs = [answered(of_model, made, draft=draft, **options) for draft in (True, False)]
    assert merged(runs[0][0]) == merged(runs[1][0])
    (first, reasoning), (second, text) = merged(runs[0][0])
    assert (first, second) == ("reasoning", "text")
    assert len(reasoning) > 0
    assert json.loads(text)["a"] in (1, 2)
    plain = plan(of_model, ASKED, response_format=asked)
    assert merged(answered(of_model, plain, max_tokens=20)[0])[0][0] == "text"


def test_reasoning_is_not_kept_in_a_session() -> None:
    """Cut short in its reasoning, too: a template may only cut out what has an end."""
    of_model = model(THINKING)
    end = of_model.tokenizer.convert_tokens_to_ids("</think>")
    for bias, kept in ((-100.0, False), (5.0, True)):
        session = of_model.session()
        options = GenerationOptions(
            max_tokens=60, temperature=1.0, seed=2, thinking=True, logit_bias=((end, bias),)
        )
        said = "".join(token.text for token in session.stream("hm", options=options))
        asked, answered = session.messages
        assert asked["content"] == "hm"
        _, found, content = said.partition("</think>")
        assert bool(found) == kept
        assert answered["content"] == content.lstrip()


def test_reasoning_cannot_end_the_answer_that_a_format_was_asked_for() -> None:
    of_model = model(THINKING)
    asked = {"type": "json_object"}
    constraint = plan(of_model, ASKED, response_format=asked, thinking=True).constraint()
    assert constraint is not None
    (mask,) = constraint.masks([0], [-1])
    for end in of_model.tokenizer.eos_token_ids:
        assert not mask[end // 32] >> end % 32 & 1


def test_reasoning_may_end_with_a_mark_of_several_tokens() -> None:
    of_model = model(THINKING)
    schema = {"type": "integer"}
    lark = answer_grammar((), False, json_term(schema), (None, "[/think]"), grammars(of_model))
    assert lark is not None
    constraint = grammars(of_model).compile(lark)
    for token in of_model.tokenizer.encode("so: [/think]7", add_special_tokens=False):
        constraint.advance(token)


@pytest.mark.parametrize(
    "asked", [{"tools": [CLOCK]}, {"response_format": {"type": "json_object"}}]
)
def test_reasoning_that_the_model_begins_itself_is_free(asked: dict[str, Any]) -> None:
    """Without a call in what it may say of calls; and it must end before the answer does."""
    thought, answer = "<think>so <tool_call> or {</think>", CALL if "tools" in asked else "{}"
    made = plan(model(), ASKED, thinking=None, **asked)
    assert written(made, thought + answer)
    assert written(made, answer)
    assert not written(made, thought.removesuffix("</think>"))
    assert not written(plan(model(), ASKED, **asked), thought + answer)
