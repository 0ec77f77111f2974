"""Tools of the Responses API: flat, in namespaces, and custom ones, whose input is free text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redrafter_mlx.server.answers.sse import Json
from redrafter_mlx.server.requests.texts import refuse
from redrafter_mlx.weights.text.markup import ToolCall

_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Arguments of a custom tool, as the model sees them."""


@dataclass(frozen=True)
class _Known:
    """A tool of the request."""

    name: str
    namespace: str | None
    custom: bool
    shown: Json  # in the format of chat completions, under the name that the model sees
    where: str  # its path in the request


class ToolSet:
    """The tools of one request that a model can call.

    left_out: those that a host runs itself, such as a web search, by their place and type
    """

    def __init__(self, given: Sequence[Mapping[str, Any]]) -> None:
        """Raises ApiError naming a tool that is no tool."""
        self.left_out: list[str] = []
        self._known = list(self._read(given, None, "tools"))
        self._by_shown = {known.shown["function"]["name"]: known for known in self._known}

    @property
    def shown(self) -> list[Json]:
        """The tools in the format of chat completions."""
        return [known.shown for known in self._known]

    def choice(self, given: str | Mapping[str, Any] | None) -> object:
        """Return a `tool_choice` in the format of chat completions."""
        if not isinstance(given, Mapping):
            return given
        kind = given.get("type")
        if kind == "allowed_tools":
            return given.get("mode", "auto")
        if kind not in ("function", "custom"):
            raise refuse("tool_choice", f"{kind!r:.40} is no tool that this server's models call")
        name = self.shown_name(str(given.get("name")), given.get("namespace"))
        return {"type": "function", "function": {"name": name}}

    def usable(self, given: str | Mapping[str, Any] | None) -> list[Json]:
        """Return the tools that a `tool_choice` allows, in the format of chat completions."""
        if not isinstance(given, Mapping) or given.get("type") != "allowed_tools":
            return self.shown
        allowed = given.get("tools")
        names = {
            self.shown_name(str(one.get("name")), one.get("namespace"))
            for one in (allowed if isinstance(allowed, list) else [])
            if isinstance(one, Mapping)
        }
        return [tool for tool in self.shown if tool["function"]["name"] in names]

    def renamed(self, param: str) -> str:
        """Return the request's name of a parameter of chat completions."""
        if (found := re.match(r"tools\.(\d+)(?:\.function)?", param)) is None:
            return param
        return self._known[int(found[1])].where + param[found.end() :]

    def shown_name(self, name: str, namespace: object) -> str:
        """Return the name of a tool that the model sees."""
        if not isinstance(namespace, str):
            return name
        return namespace + ("" if namespace.endswith("__") else "__") + name

    def item(self, call: ToolCall, item_id: str) -> Json:
        """Return a call as an item, complete but for its status."""
        known = self._by_shown.get(call.name)
        if known is not None and known.custom:
            text = json.loads(call.arguments).get("input")
            text = text if isinstance(text, str) else call.arguments
            item = {"type": "custom_tool_call", "id": f"ctc_{item_id}", "input": text}
        else:
            item = {"type": "function_call", "id": f"fc_{item_id}", "arguments": call.arguments}
        item |= {"call_id": call.id, "name": call.name if known is None else known.name}
        if known is not None and known.namespace is not None:
            item["namespace"] = known.namespace
        return item

    def _read(
        self, given: Sequence[Mapping[str, Any]], namespace: str | None, path: str
    ) -> Iterator[_Known]:
        for number, tool in enumerate(given):
            where, kind = f"{path}.{number}", tool.get("type")
            if kind == "namespace" and namespace is None:
                inside = tool.get("tools")
                if not isinstance(inside, list) or not all(isinstance(t, Mapping) for t in inside):
                    raise refuse(f"{where}.tools", "give a list of tools")
                yield from self._read(inside, str(tool.get("name")), f"{where}.tools")
            elif kind in ("function", "custom"):
                yield self._function(tool, namespace, where)
            elif isinstance(kind, str):
                self.left_out.append(f"{where} ({kind})")
            else:
                raise refuse(f"{where}.type", "give a string")

    def _function(self, tool: Mapping[str, Any], namespace: str | None, where: str) -> _Known:
        name, custom = tool.get("name"), tool["type"] == "custom"
        if not isinstance(name, str):
            raise refuse(f"{where}.name", "give a string")
        function: Json = {"name": self.shown_name(name, namespace)}
        if description := _description(tool):
            function["description"] = description
        if custom:
            function["parameters"] = _INPUT
        else:
            function |= {k: tool[k] for k in ("parameters", "strict") if tool.get(k) is not None}
        shown = {"type": "function", "function": function}
        return _Known(name, namespace, custom, shown, where)


def _description(tool: Mapping[str, Any]) -> str:
    """Return what a tool does, and the grammar of a custom tool's input."""
    described, form = tool.get("description"), tool.get("format")
    parts = [described] if isinstance(described, str) else []
    if isinstance(form, Mapping) and isinstance(form.get("definition"), str):
        parts.append(f"The input has this {form.get('syntax')} grammar:\n{form['definition']}")
    return "\n\n".join(parts)
