"""Writers of tool calls in every form that mlx-lm's parsers know, and a reader of their parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from redrafter_mlx.weights.text.markup import Markup, OutputParser

Writer = Callable[[str, dict[str, Any]], str]
"""Writes a call of a function with arguments."""

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


def tagged(head: str, parameter: str, tail: str) -> Writer:
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


def in_json(head: str, tail: str) -> Writer:
    return lambda name, given: head.replace("{name}", name) + to_json(given) + tail


def gemma(quote: str, start: str, end: str) -> Writer:
    def value(given: object) -> str:
        if isinstance(given, str):
            return quote + given + quote
        if isinstance(given, dict):
            return "{" + ",".join(f"{k}:{value(v)}" for k, v in given.items()) + "}"
        if isinstance(given, list):
            return "[" + ",".join(map(value, given)) + "]"
        return to_json(given)

    return lambda name, given: f"{start}call:{name}{value(given)}{end}"


def pythonic(written: Callable[[Any], str]) -> Writer:
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
