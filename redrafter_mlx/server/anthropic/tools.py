"""Tools of the Messages API, as chat completions have them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from redrafter_mlx.server.answers.sse import Json
from redrafter_mlx.server.requests.texts import refuse


class ToolSet:
    """The tools of one request that a model can call.

    shown:    in the format of chat completions
    left_out: those that a host runs itself, such as a web search, by their place and type
    """

    def __init__(self, given: Sequence[Mapping[str, Any]]) -> None:
        """Raises ApiError naming a tool without a schema."""
        self.shown: list[Json] = []
        self.left_out: list[str] = []
        self._places: list[int] = []
        for number, tool in enumerate(given):
            kind = tool.get("type") or "custom"
            if kind != "custom":
                self.left_out.append(f"tools.{number} ({kind})")
                continue
            if not isinstance(tool.get("input_schema"), Mapping):
                raise refuse(f"tools.{number}.input_schema", "give the JSON schema of an object")
            function = {k: tool[k] for k in ("name", "description", "strict") if k in tool}
            function["parameters"] = tool["input_schema"]
            self.shown.append({"type": "function", "function": function})
            self._places.append(number)

    def renamed(self, param: str) -> str:
        """Return the request's name of a parameter of chat completions."""
        if (found := re.match(r"tools\.(\d+)(?:\.function)?", param)) is None:
            return param
        end = param[found.end() :].replace(".parameters", ".input_schema")
        return f"tools.{self._places[int(found[1])]}{end}"
