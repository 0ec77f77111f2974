"""Tools of a request: read, checked, and written as text for a template without tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from redrafter_mlx.errors import BadInputError
from redrafter_mlx.structured.json_schema import UNUSABLE, fault_of, json_term

_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)

_NO_PARAMETERS: Mapping[str, object] = {"properties": {}}
"""What a function takes whose `parameters` are left out, as in OpenAI's API."""

_GUIDE = """\
You can call functions. Each of these lines describes one, with the JSON schema of its arguments:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as JSON between tags, like this:
<tool_call>
{{"name": "function_name", "arguments": {{"key": "value"}}}}
</tool_call>
What it returns comes back between <tool_response> tags."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    schema: JSON schema of its arguments, an object
    strict: whether a part of the schema that grammars do not support is an error
    given:  the tool as in the request, for the chat template
    path:   of its function in the request, such as "tools.0.function"
    """

    name: str
    schema: Mapping[str, object]
    strict: bool
    given: Mapping[str, Any]
    path: str

    def arguments_term(self) -> str:
        """Return the Lark term for its arguments: any object if its schema cannot be used.

        Raises BadInputError if it is strict and its schema cannot be used.
        """
        try:
            term = json_term(self.schema, lenient=not self.strict)
            fault = fault_of(term)
            if fault is not None:
                raise BadInputError(f"{UNUSABLE}: {fault}")
        except BadInputError as error:
            if self.strict:
                raise BadInputError(f"{self.path}.parameters: {error}") from error
            return json_term({"type": "object"})
        return term


@dataclass(frozen=True)
class ToolChoice:
    """Whether a tool can, must or must not be called; `name` if it must be a certain one."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None


def read_tools(given: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Read the tools of a request, in OpenAI's format.

    Raises BadInputError, which begins with the path of the wrong field.
    """
    tools: list[Tool] = []
    for number, tool in enumerate(given):
        where = f"tools.{number}"
        kind, function = tool.get("type", "function"), tool.get("function")
        if kind != "function":
            raise BadInputError(f"{where}.type: {kind!r:.40}; only functions can be called")
        if not isinstance(function, Mapping):
            raise BadInputError(f"{where}.function: give an object with a name")
        where += ".function"
        name, schema = function.get("name"), function.get("parameters", _NO_PARAMETERS) or {}
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise BadInputError(f"{where}.name: {name!r:.80}; give 1 to 128 letters, digits, _-.")
        if any(name == known.name for known in tools):
            raise BadInputError(f"{where}.name: {name!r} is there twice")
        if not isinstance(schema, Mapping) or not _allows_objects(schema):
            raise BadInputError(f"{where}.parameters: give the JSON schema of an object")
        strict = function.get("strict") is True
        tools.append(Tool(name, {**schema, "type": "object"}, strict, tool, where))
    return tuple(tools)


def _allows_objects(schema: Mapping[str, object]) -> bool:
    """Whether a schema may match objects; some clients write "OBJECT", "any" or a list of types."""
    kinds = schema.get("type") or "object"
    names = [str(kind).lower() for kind in (kinds if isinstance(kinds, list) else [kinds])]
    return "object" in names or "any" in names


def read_choice(given: object, tools: Sequence[Tool]) -> ToolChoice:
    """Read OpenAI's `tool_choice`; raises BadInputError naming it."""
    if given is None or given == "auto":
        return ToolChoice("auto" if tools else "none")
    if given == "none":
        return ToolChoice("none")
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if given != "required" and not isinstance(name, str):
        raise BadInputError(
            f"tool_choice: {given!r:.80}; give none, auto, required, or "
            '{"type": "function", "function": {"name": ...}}'
        )
    known = [tool.name for tool in tools]
    if not known:
        raise BadInputError("tool_choice: there are no tools to choose from")
    if name is not None and name not in known:
        raise BadInputError(f"tool_choice: {name!r:.80}; there are {', '.join(known)}")
    return ToolChoice("required", name)


def spelled_out(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """Return checked messages for a template without tools: tools, calls and results as text.

    The tools join the user's first message, since some templates support no system message either.
    Results become messages of the user, joined with each other and with what the user writes next:
    some templates insist that user and assistant take turns.
    """
    rendered: list[dict[str, Any]] = []
    joins = False
    for message in messages:
        role, parts = message["role"], [message["content"]]
        parts += [_call_text(call["function"]) for call in message.get("tool_calls") or ()]
        others = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id")}
        if role == "tool":
            parts = [f"<tool_response>\n{message['content']}\n</tool_response>"]
            others = {"role": "user"}
        others["content"] = "\n".join(part for part in parts if part)
        joins = joins and others["role"] == "user"
        if joins:
            rendered[-1]["content"] += f"\n{others['content']}"
        else:
            rendered.append(others)
        joins = joins or role == "tool"
    if tools:
        guide = _GUIDE.format(
            tools="\n".join(json.dumps(tool.given, ensure_ascii=False) for tool in tools)
        )
        first = next((message for message in rendered if message["role"] == "user"), None)
        if first is None:
            rendered.append({"role": "user", "content": guide})
        else:
            first["content"] = f"{guide}\n\n{first['content']}"
    return rendered


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
