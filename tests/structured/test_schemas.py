"""Which schemas of tools and formats hold, in part or whole, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
from output_plans import ASKED, WEATHER, model, plan, tool, written

from redrafter_mlx.errors import BadInputError
from redrafter_mlx.structured import json_schema
from redrafter_mlx.structured.json_schema import json_term


def test_a_json_object_may_have_a_schema_as_in_llama_server() -> None:
    schema = {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"]}
    made = plan(model(), ASKED, response_format={"type": "json_object", "schema": schema})
    assert written(made, '{"x": 1}')
    assert not written(made, "{}")


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
         "response_format: a schema"),
        ({"tools": [{"type": "web"}]}, "tools.0.type"),
        ({"tools": [WEATHER, {"type": "function"}]}, "tools.1.function"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [WEATHER, WEATHER]}, "twice"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "parameters"),
        ({"tools": [{"function": {"name": "f", "strict": True,
                                  "parameters": {"properties": {"x": {"not": {}}}}}}]},
         "tools.0.function.parameters: .*not"),
        ({"tools": [WEATHER, {"function": {"name": "f", "strict": True, "parameters":
                                           {"properties": {"x": {"type": "any"}}}}}]},
         "tools.1.function.parameters: .*any"),
        ({"tools": [tool("f" * 129)]}, "tools.0.function.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "strict": True, "schema": {"type": "array", "uniqueItems": True}}}},
         "response_format: a schema.*uniqueItems"),
        ({"tools": [{"function": {"name": "f", "strict": True, "parameters": {"minimum": 1e999}}}]},
         "tools.0.function.parameters: the JSON schema"),
        ({"response_format": {"type": "json_schema",
                              "json_schema": {"schema": {"minimum": 1e999}}}},
         "response_format.json_schema.schema: the JSON schema"),
        ({"tools": [WEATHER], "tool_choice": "clock"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "clock"}}},
         "tool_choice: 'clock'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for_is_refused_by_name(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInputError, match=named):
        plan(model(), ASKED, **asked).constraint()


@pytest.mark.parametrize(
    ("parameters", "taken", "refused"),
    [
        ({"$schema": "odd", "properties": {"x": {"type": "integer"}}}, '{"x": 1}', '{"x": "a"}'),
        ({"required": None, "properties": {"x": {"enum": [1]}}}, '{"x": 1}', '{"x": 2}'),
        ({"type": ["object", "null"], "properties": {"x": {"enum": [1]}}}, '{"x": 1}', "null"),
        ({"properties": {"x": {"pattern": "^(?=a)", "type": "string"}}}, '{"x": "b"}', '{"x": 1}'),
        ({"properties": {"x": {"format": "odd", "type": "string"}}}, '{"x": "b"}', '{"x": 1}'),
        ({"properties": None}, '{"x": 1}', "[1]"),
        (
            {"properties": {"x": {"enum": [1]}}, "required": ["x", "y"]},
            '{"x": 1, "y": 2}',
            '{"x": 2, "y": 2}',
        ),
        ({"properties": {"x": {"type": "any"}}}, '{"x": 1}', "[1]"),
        ({"type": "OBJECT", "properties": {"x": {"type": "STRING"}}}, '{"x": 1}', "[1]"),
        ({"properties": {"x": {"$ref": "http://a.example/b.json"}}}, '{"x": 1}', "[1]"),
    ],
)
def test_an_odd_schema_of_a_tool_does_not_refuse_the_request(
    parameters: dict[str, Any], taken: str, refused: str
) -> None:
    """The other tool's schema still holds."""
    odd = {"type": "function", "function": {"name": "f" * 128, "parameters": parameters}}
    made = plan(model(), ASKED, tools=[odd, WEATHER], tool_choice="required")

    def call(name: str, arguments: str) -> str:
        return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'

    assert written(made, call("f" * 128, taken))
    assert not written(made, call("f" * 128, refused))
    assert written(made, call("weather", '{"city": "Oslo", "days": 1}'))
    assert not written(made, call("weather", '{"city": "Bern", "days": 1}'))


def test_a_tool_without_parameters_takes_no_arguments() -> None:
    """As in OpenAI's API; an empty schema allows any."""
    now: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
    text = '<tool_call>{"name": "now", "arguments": %s}</tool_call>'
    without = plan(model(), ASKED, tools=[now], tool_choice="required")
    assert written(without, text % "{}")
    assert not written(without, text % '{"x": 1}')
    now["function"]["parameters"] = {}
    assert written(plan(model(), ASKED, tools=[now], tool_choice="required"), text % '{"x": 1}')


@pytest.mark.parametrize("strict", [None, False])
def test_a_format_that_is_not_strict_may_have_rules_that_grammars_do_not_know(
    strict: bool | None,
) -> None:
    email = {"type": "string", "pattern": r"^(?!\.)[a-z]+@b$"}
    names = {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True}
    schema = {"properties": {"email": email, "names": names}, "required": ["email", "names"]}
    named = {"name": "s", "schema": schema} | ({} if strict is None else {"strict": strict})
    made = plan(model(), ASKED, response_format={"type": "json_schema", "json_schema": named})
    assert written(made, '{"email": "a@b", "names": ["a", "a"]}')
    assert not written(made, '{"email": 1, "names": []}')
    assert not written(made, '{"email": "a@b", "names": ["b"]}')


def test_references_that_would_overflow_the_parser_are_refused() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(300)}
    with pytest.raises(BadInputError, match="references"):
        json_term({"$ref": "#/$defs/d0", "$defs": {**chain, "d300": {"type": "string"}}})


def test_a_long_format_or_pattern_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_schema, "fault_of", lambda _: pytest.fail("it was tried"))
    assert "format" not in json_term({"type": "string", "format": "x" * 10_000})


def test_an_empty_format_is_text() -> None:
    assert plan(model(), ASKED, response_format={}).constraint() is None


def test_a_tool_that_is_not_strict_may_have_a_schema_that_cannot_be_used() -> None:
    odd = {"type": "object", "properties": {}, "required": [{"x": 1}], "minimum": 1e999}
    asked = [{"type": "function", "function": {"name": "f", "parameters": odd}}]
    assert plan(model(), ASKED, tools=asked, tool_choice="required").constraint() is not None
