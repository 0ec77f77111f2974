"""Calls that must be made, or that the model begins, are led to their end."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from mlx_lm.tool_parsers import qwen3_coder
from output_plans import (
    ASKED,
    CLOCK,
    WEATHER,
    WITH_TOOLS,
    answered,
    merged,
    model,
    plan,
    tokenizer,
    tool,
)
from tiny import CHAT_TEMPLATE

from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.weights.text.markup import JSON_CALLS, Markup


@pytest.mark.parametrize(
    ("template", "choice", "special"),
    [
        (WITH_TOOLS, "required", True),
        (WITH_TOOLS, "weather", False),
        (CHAT_TEMPLATE, "weather", False),
    ],
)
def test_a_call_that_must_be_made_is_made_and_valid(
    template: str, choice: str, special: bool
) -> None:
    of_model = model(template, special)
    given: object = choice
    if choice != "required":
        given = {"type": "function", "function": {"name": choice}}
    made = plan(of_model, ASKED, tools=[WEATHER, CLOCK], tool_choice=given)
    options = {"max_tokens": 300, "temperature": 1.3, "seed": 5}
    runs = [answered(of_model, made, draft=draft, **options) for draft in (True, False)]
    assert merged(runs[0][0]) == merged(runs[1][0])
    (delta,), reason = runs[0]
    assert reason == "stop"
    assert delta.tool_call is not None
    arguments = json.loads(delta.tool_call.arguments)
    if delta.tool_call.name == "weather":
        assert arguments["city"] in ("Rome", "Oslo")
        assert arguments["days"] in (1, 2)
    else:
        assert choice == "required"
        assert len(arguments["zone"]) <= 3


@pytest.mark.parametrize("special", [False, True])
def test_a_call_that_the_model_begins_is_led_to_its_end(special: bool) -> None:
    """A bias makes the random model emit the mark; what follows it is a valid call."""
    of_model = model(WITH_TOOLS, special)
    made = plan(of_model, ASKED, tools=[WEATHER, CLOCK])
    mark = of_model.tokenizer.convert_tokens_to_ids("<tool_call>")
    options = {"max_tokens": 150, "temperature": 1.0, "seed": 1, "logit_bias": {mark: 9.0}}
    runs = [answered(of_model, made, draft=draft, **options) for draft in (True, False)]
    assert merged(runs[0][0]) == merged(runs[1][0])
    calls = [delta.tool_call for delta in runs[0][0] if delta.tool_call is not None]
    assert len(calls) > 1
    text = "".join(delta.content for delta in runs[0][0])
    assert text.count("<tool_call>") <= (runs[0][1] == "length"), "but the last, cut short"


def test_calls_that_begin_among_accepted_drafts_of_a_batch_are_those_of_each_answer_alone() -> None:
    """Copies draft the mark where the text had it before; rows begin calls at different steps."""
    of_model = Redrafter(model().target.model, tokenizer(WITH_TOOLS), host_drafters=(Lookup(),))
    mark = of_model.tokenizer.convert_tokens_to_ids("<tool_call>")
    options = {"max_tokens": 150, "temperature": 1.0, "logit_bias": {mark: 9.0}}
    accepted: list[int] = []

    def calls(seed: int, **more: Any) -> list[tuple[str, str]]:
        made = plan(of_model, ASKED, tools=[WEATHER, CLOCK])
        parser, found, constraint = made.parser(), [], made.constraint()
        for response in of_model.stream(made.prompt, constraint=constraint, seed=seed, **more):
            found += parser.feed(response.text)
            if response.token == mark and response.source != "model":
                accepted.append(seed)
        return merged(found + parser.finish())

    seeds = range(4)
    alone = [calls(seed, draft=False, **options) for seed in seeds]
    assert not accepted
    with ThreadPoolExecutor(len(seeds)) as threads:
        together = list(
            threads.map(lambda seed: calls(seed, beam_width=1, beam_length=5, **options), seeds)
        )
    assert together == alone
    assert len(set(accepted)) > 1
    assert all(sum(name in ("weather", "clock") for name, _ in row) > 1 for row in alone)


@pytest.mark.parametrize("template", [WITH_TOOLS, CHAT_TEMPLATE])
@pytest.mark.parametrize("several", [True, False])
def test_text_is_free_up_to_a_mark_and_from_there_a_call(template: str, several: bool) -> None:
    """Also if the mark consists of several tokens."""
    of_model = model(template)
    made = plan(of_model, ASKED, tools=[CLOCK], parallel_tool_calls=several)
    constraint = made.constraint()
    assert constraint is not None

    def allowed() -> set[int]:
        masks = constraint.masks([0], [-1])
        V = of_model.target.vocab_size
        return (
            set(range(V))
            if masks is None
            else {t for t in range(V) if masks[0][t // 32] >> (t % 32) & 1}
        )

    def write(text: str) -> None:
        for token in of_model.tokenizer.encode(text, add_special_tokens=False):
            constraint.advance(token)

    end, brace = of_model.tokenizer.eos_token_id, *of_model.tokenizer.encode("{")
    write("Well <b")
    assert {end, brace} < allowed()
    write("r><tool_call>")
    assert brace in allowed()
    assert len(allowed()) == 2, "or a new line"
    write('{"name": "clock", "arguments": {"zone":"UT"}}</tool_call>')
    assert constraint.ended != several
    assert (brace in allowed()) == several
    assert end in allowed()


def test_a_call_cut_short_keeps_its_finish_reason_and_its_text() -> None:
    made = plan(model(), ASKED, tools=[WEATHER], tool_choice="required")
    found, reason = answered(model(), made, max_tokens=20)
    assert reason == "length"
    assert merged(found)[0][1].startswith("<tool_call>")
    assert not any(delta.tool_call for delta in found)


def test_with_a_format_and_tools_the_answer_is_a_call_or_the_format() -> None:
    asked = {"type": "json_object"}
    made = plan(model(), ASKED, tools=[CLOCK], response_format=asked)
    constraint = made.constraint()
    assert constraint is not None
    mark = model().tokenizer.convert_tokens_to_ids("<tool_call>")
    masks = constraint.masks([0], [-1])
    assert masks is not None
    first = {t for t in range(262) if masks[0][t // 32] >> (t % 32) & 1}
    assert first == {mark, *model().tokenizer.encode("{", add_special_tokens=False)}


def test_a_schema_that_grammars_do_not_know_whole_still_leads_a_call() -> None:
    """Unless the tool is strict, unsupported parts of the schema are ignored."""
    loose = tool(
        "f", x={"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "maxItems": 2}
    )
    made = plan(model(), ASKED, tools=[loose], tool_choice="required")
    (delta,), _ = answered(model(), made, max_tokens=300)
    assert delta.tool_call is not None
    assert set(json.loads(delta.tool_call.arguments)["x"]) <= {1}


@pytest.mark.parametrize("strict", [False, True])
def test_a_strict_tools_calls_are_json_where_the_models_own_form_has_no_grammar(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Markup("<think>", "</think>", "<tool_call>", "</tool_call>", qwen3_coder.parse_tool_call)
    monkeypatch.setattr("redrafter_mlx.structured.plan.markup_of", lambda *_: own)
    asked = {"type": "function", "function": {**CLOCK["function"], "strict": strict}}
    made = plan(model(), ASKED, tools=[asked])
    assert (made.markup.tool_parser is JSON_CALLS.tool_parser) == strict
    assert (made.constraint() is not None) == strict
