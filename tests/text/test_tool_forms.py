"""Every form of tool calls that mlx-lm's parsers know, read from an answer's text."""

from __future__ import annotations

import pkgutil
import random
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest
from mlx_lm import tool_parsers
from mlx_lm.chat_templates import muse_spark as muse_spark_template
from mlx_lm.tool_parsers import glm47, muse_spark
from tool_writers import SCHEMAS, TOOLS, WRITERS, Writer, parser, parts, tool

from redrafter_mlx.weights.text.calls.forms import FORMS
from redrafter_mlx.weights.text.markup import JSON_CALLS, Markup, OutputParser

MARKS = {
    "qwen3_coder": ["</parameter>", "</function>", "<function=g>", "<parameter=z>"],
    "glm47": ["</arg_value>", "<arg_key>", "</arg_key>"],
    "laguna": ["</arg_value>", "<arg_key>", "</arg_key>"],
    "longcat": ["</longcat_arg_value>", "<longcat_arg_key>"],
    "minimax_m2": ["</parameter>", "</invoke>"],
    "minicpm5": ["</param>", "]]>"],
    "muse_spark": ["</atem:parameter>", "</atem:invoke>"],
    "kimi_k3": ["<|close|>argument<|sep|>", "<|close|>call<|sep|>"],
    "kimi_k2": ["<|tool_call_end|>"],
    "mistral": ["[ARGS]"],
    "pythonic": [")]"],
    "gemma4": ['<|"|>', "}"],
    "function_gemma": ["<escape>", "}"],
}
WORDS = ["one", "é😀", "\n", "  ", '"', "'", "\\", "{", "]", "<", "</", ",", "a:b", "null", "12"]


def random_value(rng: random.Random, kind: str, marks: Sequence[str], depth: int = 0) -> Any:
    if kind in ("string", "nullable"):
        words = [rng.choice([*WORDS, *marks, *marks]) for _ in range(rng.randrange(6))]
        return " ".join(words) if words != ["null"] else None
    if kind in ("array", "object"):
        inner = ["string", "integer", "maybe", *(["array", "object"] if depth < 2 else [])]
        values = [random_value(rng, rng.choice(inner), marks, depth + 1) for _ in range(2)]
        return values if kind == "array" else {f"k{i}": value for i, value in enumerate(values)}
    return rng.choice(
        {
            "integer": [0, -7, 2**53 + 1, 10**30],
            "number": [0.5, 3, -1e-07, 1e100],
            "boolean": [True, False],
            "maybe": [None, 12],
            "choice": ["1", "null", "true"],
        }[kind]
    )


def test_every_parser_of_mlx_lm_has_a_form() -> None:
    modules = {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)}
    assert modules - FORMS.keys() == {"laguna"}, "which is glm47's"
    assert modules == {form for form, _ in WRITERS}


@pytest.mark.parametrize(("form", "write"), WRITERS, ids=[form for form, _ in WRITERS])
def test_any_arguments_are_read_as_they_were_written(form: str, write: Writer) -> None:
    """With the form's own marks in strings, whole and in any pieces."""
    module = import_module(f"mlx_lm.tool_parsers.{form}")
    marks = [*MARKS.get(form, []), module.tool_call_start, module.tool_call_end or " "]
    if form == "minicpm5":
        marks.remove(module.tool_call_start)  # a call of its own, if a name follows
    for seed in range(40):
        rng = random.Random(seed)
        given = {kind: random_value(rng, kind, marks) for kind in SCHEMAS if rng.random() < 0.5}
        given = {k: v for k, v in given.items() if v is not None or k in ("nullable", "maybe")}
        text = f"Well {write('f.x-y', given)}"
        cuts = sorted(rng.randrange(len(text)) for _ in range(9))
        cut = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        for pieces in ([text], list(text), cut):
            assert parts(parser(form), pieces) == ([("f.x-y", given)], "Well "), text


@pytest.mark.parametrize(("form", "write"), WRITERS, ids=[form for form, _ in WRITERS])
def test_several_calls_and_text_between_them_are_told_apart(form: str, write: Writer) -> None:
    first, second = write("f.x-y", {"string": "a", "integer": 5}), write("g", {})
    for pieces in (list(first + "\n" + second), [first + "\n" + second]):
        calls = [("f.x-y", {"string": "a", "integer": 5}), ("g", {})]
        assert parts(parser(form), pieces) == (calls, "")
    if form != "mistral":  # its calls have no end mark
        for text in (f"{first} so {second} it is", f"{first}so{second}it is"):
            content = "so it is" if " so " in text else "soit is"
            assert parts(parser(form), [text]) == (calls, content)
            assert parts(parser(form), list(text)) == (calls, content)


@pytest.mark.parametrize(("form", "write"), WRITERS, ids=[form for form, _ in WRITERS])
def test_a_call_of_an_unknown_tool_is_text(form: str, write: Writer) -> None:
    text = write("unknown", {"a": 1}) + " so"
    for pieces in ([text], list(text)):
        assert parts(parser(form), pieces) == ([], text)


@pytest.mark.parametrize(
    ("key", "raw", "value"),
    [
        ("integer", "1e3", 1000),
        ("integer", "5.0", 5),
        ("integer", "5.5", "5.5"),
        ("integer", "9" * 5000, "9" * 5000),
        ("number", ".5", 0.5),
        ("number", "NaN", "NaN"),
        ("number", "-Infinity", "-Infinity"),
        ("boolean", "True", True),
        ("boolean", "yes", "yes"),
        ("array", "['a', None]", ["a", None]),
        ("array", "[" * 5000, "[" * 5000),
        ("object", '{"a": 1e400, "b": NaN}', {"a": "1e400", "b": "NaN"}),
        ("object", "[1]", "[1]"),
        ("maybe", "None", None),
        ("unlisted", "12", 12),
        ("unlisted", "012", "012"),
        ("unlisted", '"a"', '"a"'),
        ("unlisted", "[1, {}]", [1, {}]),
    ],
)
def test_text_that_is_not_of_its_type_stays_text(key: str, raw: str, value: object) -> None:
    pair = f"<arg_key>{key}</arg_key><arg_value>{raw}</arg_value>"
    assert parts(parser("glm47"), [f"<tool_call>f.x-y{pair}</tool_call>"])[0] == [
        ("f.x-y", {key: value})
    ]


def test_digits_of_a_number_are_not_lost() -> None:
    digits = "0.12345678901234567890123"
    call = f'<tool_call>{{"name": "g", "arguments": {{"x": [{digits}]}}}}</tool_call>'
    (delta,) = parser("json_tools").feed(call)
    assert delta.tool_call is not None
    assert delta.tool_call.arguments == f'{{"x": [{digits}]}}'


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("mistral", '[TOOL_CALLS]f.x-y[ARGS]{"string": 12, "nullable": true}'),
        ("pythonic", "<|tool_call_start|>[f.x-y(string=12, nullable=true)]<|tool_call_end|>"),
        ("gemma4", "<|tool_call>call:f.x-y{string:12,nullable:true}<tool_call|>"),
    ],
)
def test_a_number_where_only_a_string_may_be_is_its_text(form: str, text: str) -> None:
    found = [("f.x-y", {"string": "12", "nullable": "true"})]
    assert parts(parser(form), [text]) == (found, "")


@pytest.mark.parametrize(
    ("form", "text", "found"),
    [
        ("json_tools", '<tool_call>{"name": "f.x-y", "arguments": {"array": []}', [{"array": []}]),
        ("json_tools", '<tool_call>{"name": "f.x-y"', []),
        ("json_tools", '<tool_call>{"name": "f.x-y", "arguments": {"string": "Ro', []),
        ("qwen3_coder", "<tool_call>\n<function=f.x-y>\n", []),
        ("qwen3_coder", "<tool_call><function=f.x-y><parameter=string>\nRo", [{"string": "Ro"}]),
        ("glm47", "<tool_call>f.x-y", []),
        ("pythonic", "<|tool_call_start|>[f.x-y(array=[1]", [{"array": [1]}]),
        ("gemma4", '<|tool_call>call:f.x-y{string:<|"|>Rome<|"|>', [{"string": "Rome"}]),
    ],
)  # fmt: skip
def test_a_call_is_read_as_far_as_its_arguments_are_whole(
    form: str, text: str, found: list[dict[str, object]]
) -> None:
    """At the end of an answer that was not cut; if it was, none of these is a call."""
    calls = [("f.x-y", arguments) for arguments in found]
    assert parts(parser(form), [text]) == (calls, "" if calls else text)
    assert parts(parser(form), list(text)) == (calls, "" if calls else text)
    assert parts(parser(form), [text], cut=True) == ([], text)


@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        ("json_tools", '<tool_call>{"name": "g", "arguments": {"x": 1}}}</tool_call> so', "} so"),
        ("json_tools", '<tool_call>{"name": "g", "parameters": {"x": 1}}</tool_call> so', "so"),
        ("json_tools", '<tool_call>{"name": "g", "x": 1}\n</tool_call> so', "so"),
        ("json_tools", "<tool_call>{'name': 'g', 'arguments': {'x': 1}}</tool_call> so", "so"),
        ("json_tools", '<tool_call>{"function": {"name": "g", "arguments": "{\\"x\\": 1}"}}'
                       "</tool_call> so", "so"),
        ("glm47", '<tool_call>g {"x": 1}</tool_call> so', "so"),
        ("glm47", "<tool_call>g x=1</tool_call> so", "so"),
        ("longcat", '<longcat_tool_call>{"name": "g", "arguments": {"x": 1}}'
                    "</longcat_tool_call> so", "so"),
        ("kimi_k2", "<|tool_calls_section_begin|>g:0<|tool_call_argument_begin|>{'x': 1}"
                    "<|tool_calls_section_end|> so", "so"),
        ("mistral", '[TOOL_CALLS]g{"x": 1} so', "so"),
        ("minimax_m2", "<minimax:tool_call><invoke name=g><parameter name='x'>1</parameter>"
                       "</invoke></minimax:tool_call> so", "so"),
        ("qwen3_coder", "<function=g>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>so",
         "so"),
        ("kimi_k2", '<|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{"x": 1}'
                    "<|tool_call_end|><|tool_calls_section_end|>so", "so"),
        ("function_gemma", '<start_function_call>call:g{"x":1}<end_function_call> so', "so"),
    ],
)  # fmt: skip
def test_what_else_models_write_in_a_form_is_read(form: str, text: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert parts(parser(form), pieces) == ([("g", {"x": 1})], content)


@pytest.mark.parametrize(
    "text", ["a <function=g> b", "a <function=g><parameter=x", "<function=g> <function=h>", "<func"]
)
def test_text_about_the_tags_of_calls_stays_text(text: str) -> None:
    for pieces in ([text], list(text)):
        assert parts(parser("qwen3_coder"), pieces, cut=True) == ([], text)


def test_text_between_calls_without_start_marks_is_content() -> None:
    body = "<parameter=string>\nx\n</parameter>\n</function>\n</tool_call>"
    text = f"<function=f.x-y>\n{body} so <function=f.x-y>\n{body}"
    for pieces in ([text], list(text)):
        calls = [("f.x-y", {"string": "x"})] * 2
        assert parts(parser("qwen3_coder"), pieces) == (calls, "so ")


def test_a_schema_whose_references_go_in_a_circle_says_nothing_of_a_type() -> None:
    circle = {"anyOf": [{"$ref": "#/properties/x"}, {"$ref": "#/properties/x"}]}
    parsed = OutputParser(
        Markup(
            tool_call_start=glm47.tool_call_start,
            tool_call_end=glm47.tool_call_end,
            tool_parser=glm47.parse_tool_call,
        ),
        [tool("f", x=circle)],
    )
    text = "<tool_call>f<arg_key>x</arg_key><arg_value>5</arg_value></tool_call>"
    assert parts(parsed, [text]) == ([("f", {"x": 5})], "")


def test_a_call_in_reasoning_is_a_call_and_the_reasoning_goes_on() -> None:
    text = f"<think>hm {WRITERS[1][1]('g', {})} so</think>yes"
    of = parser("qwen3_coder", think_start="<think>", think_end="</think>")
    deltas = of.feed(text) + of.finish()
    assert "".join(delta.reasoning for delta in deltas) == "hm so"
    assert [delta.tool_call.name for delta in deltas if delta.tool_call] == ["g"]
    assert "".join(delta.content for delta in deltas) == "yes"


def test_a_model_whose_calls_follow_a_header_reads_calls_as_json_where_those_are_required() -> None:
    """Muse Spark's messages begin in a state of their own; without tools, its marks are text."""
    of_model = Markup(
        tool_call_start=muse_spark.tool_call_start,
        tool_call_end=muse_spark.tool_call_end,
        tool_parser=muse_spark.parse_tool_call,
        response_transitions=muse_spark_template.RESPONSE_FORMAT["transitions"],
        initial_state="header",
    )
    own, in_json = WRITERS[7][1]("g", {"x": 1}), WRITERS[0][1]("g", {"x": 1})
    assert parts(OutputParser(of_model, TOOLS), [own]) == ([("g", {"x": 1})], "")
    of_json = OutputParser(of_model.with_calls_of(JSON_CALLS), TOOLS)
    assert parts(of_json, [in_json]) == ([("g", {"x": 1})], "")
    said = "to=user<|message|>" + own
    assert parts(OutputParser(of_model, []), [said]) == ([], own)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("gemma4", '<|tool_call>call:f.x-y{string:<|"|>a<|"|>,integer:5,string:<|"|>b<|"|>}'
                   "<tool_call|>"),
        ("pythonic", '<|tool_call_start|>[f.x-y("a", 5, string="b")]<|tool_call_end|>'),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="g" index="1"<|sep|>'
                    '<|open|>argument key="x" so <|close|>tools<|sep|>1<|close|>argument<|sep|>'
                    "<|close|>call<|sep|><|close|>tools<|sep|>"),
        ("muse_spark", '<atem:function_calls><atem:invoke name="g"><atem:parameter name="x" so '
                       "<b>1</atem:parameter></atem:invoke></atem:function_calls>"),
    ],
)  # fmt: skip
def test_no_value_of_a_call_is_lost_to_another_of_its_key_or_to_a_broken_tag(
    form: str, text: str
) -> None:
    for pieces in ([text], list(text)):
        assert parts(parser(form), pieces) == ([], text)


@pytest.mark.parametrize("form", ["gemma4", "function_gemma"])
def test_text_and_a_call_of_an_unknown_tool_after_a_call_are_content(form: str) -> None:
    write = next(write for known, write in WRITERS if known == form)
    given = {"string": "a", "integer": 5, "nullable": None}
    text = f" so {write('unknown', given)}"
    whole = write("f.x-y", given) + text
    for pieces in ([whole], list(whole)):
        assert parts(parser(form), pieces) == ([("f.x-y", given)], text.lstrip())
