"""Every form of tool calls that mlx-lm's parsers know, read from an answer's text."""

from __future__ import annotations

import json
import pkgutil
import random
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
from mlx_lm import tool_parsers

from redrafter_mlx.weights.calls.forms import FORMS
from redrafter_mlx.weights.markup import Markup, OutputParser

SCHEMAS: dict[str, dict[str, object]] = {
    "string": {"type": "string"},
    "integer": {"$ref": "#/$defs/whole"},
    "number": {"type": "number"},
    "boolean": {"anyOf": [{"type": "boolean"}]},
    "array": {"type": "array", "items": {}},
    "object": {"type": "OBJECT"},
    "nullable": {"type": ["string", "null"]},
    "maybe": {"oneOf": [{"type": "integer"}, {"type": "null"}]},
    "choice": {"enum": ["1", "null", "true"]},
}
"""By the name of the parameter."""


def tool(name: str, **properties: object) -> dict[str, Any]:
    parameters = {"properties": properties, "$defs": {"whole": {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("f.x-y", **SCHEMAS), tool("g"), {"type": "function", "function": {"name": "h"}}]


def parser(form: str, **reasoning: str) -> OutputParser:
    module = import_module(f"mlx_lm.tool_parsers.{form}")
    start, end = module.tool_call_start, module.tool_call_end
    markup = Markup(
        tool_call_start=start, tool_call_end=end, tool_parser=module.parse_tool_call, **reasoning
    )
    return OutputParser(markup, TOOLS)


def parts(of: OutputParser, pieces: Sequence[str], cut: bool = False) -> tuple[list[Any], str]:
    """Return the names and arguments of calls, and the content."""
    deltas = [delta for piece in pieces for delta in of.feed(piece)] + of.finish(cut=cut)
    calls = [delta.tool_call for delta in deltas if delta.tool_call is not None]
    found = [(call.name, json.loads(call.arguments)) for call in calls]
    return found, "".join(delta.content for delta in deltas)


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: object) -> str:
    return value if isinstance(value, str) else to_json(value)


def tagged(head: str, parameter: str, tail: str) -> Callable[[str, dict[str, Any]], str]:
    """Return a writer of calls; `{k}`, `{v}` and `{t}` are a parameter's key, value and type."""
    types = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}

    def write(name: str, arguments: dict[str, Any]) -> str:
        body = "".join(
            parameter.replace("{k}", k)
            .replace("{t}", types.get(type(v), "object"))
            .replace("{v}", bare(v))
            for k, v in arguments.items()
        )
        return head.replace("{name}", name) + body + tail

    return write


def in_json(head: str, tail: str) -> Callable[[str, dict[str, Any]], str]:
    return lambda name, given: head.replace("{name}", name) + to_json(given) + tail


def gemma(quote: str, start: str, end: str) -> Callable[[str, dict[str, Any]], str]:
    def value(given: object) -> str:
        if isinstance(given, str):
            return quote + given + quote
        if isinstance(given, dict):
            return "{" + ",".join(f"{k}:{value(v)}" for k, v in given.items()) + "}"
        if isinstance(given, list):
            return "[" + ",".join(map(value, given)) + "]"
        return to_json(given)

    return lambda name, given: f"{start}call:{name}{value(given)}{end}"


def pythonic(written: Callable[[Any], str]) -> Callable[[str, dict[str, Any]], str]:
    def write(name: str, given: dict[str, Any]) -> str:
        arguments = ", ".join(f"{k}={written(v)}" for k, v in given.items())
        return f"<|tool_call_start|>[{name}({arguments})]<|tool_call_end|>"

    return write


WRITERS = [
    ("json_tools", in_json('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>")),
    ("qwen3_coder", tagged("<tool_call>\n<function={name}>\n",
                           "<parameter={k}>\n{v}\n</parameter>\n", "</function>\n</tool_call>")),
    ("glm47", tagged("<tool_call>{name}\n",
                     "<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n", "</tool_call>")),
    ("laguna", tagged("<tool_call>{name}",
                      "<arg_key>{k}</arg_key><arg_value>{v}</arg_value>", "</tool_call>")),
    ("longcat", tagged("<longcat_tool_call>{name}\n", "<longcat_arg_key>{k}</longcat_arg_key>\n"
                       "<longcat_arg_value>{v}</longcat_arg_value>\n", "</longcat_tool_call>")),
    ("minimax_m2", tagged('<minimax:tool_call>\n<invoke name="{name}">\n',
                          '<parameter name="{k}">{v}</parameter>\n',
                          "</invoke>\n</minimax:tool_call>")),
    ("minicpm5", tagged('<function name="{name}">',
                        '<param name="{k}"><![CDATA[{v}]]></param>', "</function>")),
    ("muse_spark", tagged('<atem:function_calls>\n<atem:invoke name="{name}">\n',
                          '<atem:parameter name="{k}">{v}</atem:parameter>\n',
                          "</atem:invoke>\n</atem:function_calls>")),
    ("kimi_k3", tagged('<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>',
                       '<|open|>argument key="{k}" type="{t}"<|sep|>{v}<|close|>argument<|sep|>',
                       "<|close|>call<|sep|><|close|>tools<|sep|>")),
    ("kimi_k3", in_json('<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>'
                        '<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"
                        "<|close|>call<|sep|><|close|>tools<|sep|>")),
    ("kimi_k2", in_json("<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0"
                        "<|tool_call_argument_begin|>",
                        "<|tool_call_end|><|tool_calls_section_end|>")),
    ("mistral", in_json("[TOOL_CALLS]{name}[CALL_ID]abc123def[ARGS]", "")),
    ("mistral", in_json('[TOOL_CALLS] [{"name": "{name}", "arguments": ', "}]")),
    ("pythonic", pythonic(to_json)),
    ("pythonic", pythonic(repr)),
    ("gemma4", gemma('<|"|>', "<|tool_call>", "<tool_call|>")),
    ("function_gemma", gemma("<escape>", "<start_function_call>", "<end_function_call>")),
]  # fmt: skip
"""How chat templates write calls."""

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
def test_any_arguments_are_read_as_they_were_written(
    form: str, write: Callable[[str, dict[str, Any]], str]
) -> None:
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
def test_several_calls_and_text_between_them_are_told_apart(
    form: str, write: Callable[[str, dict[str, Any]], str]
) -> None:
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
def test_a_call_of_an_unknown_tool_is_text(
    form: str, write: Callable[[str, dict[str, Any]], str]
) -> None:
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
