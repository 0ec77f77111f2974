"""Schemas of requests to Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from redrafter_mlx.server.anthropic.tools import ToolSet
from redrafter_mlx.server.requests.fields import Int, as_limit, as_list
from redrafter_mlx.server.requests.generation_request import GenerationRequest
from redrafter_mlx.server.requests.schema import Schema

_EFFORTS = {"max": "high", "xhigh": "high"}  # Anthropic's levels that chat templates do not know


class Thinking(Schema):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Field(ge=0), BeforeValidator(as_limit)] = None
    display: str | None = None


class OutputConfig(Schema):
    effort: str | None = None
    format: dict[str, Any] | None = None


class ToolChoice(Schema):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Message(Schema):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountRequest(GenerationRequest):
    """POST /v1/messages/count_tokens"""

    refused: ClassVar[Mapping[str, str]] = {
        "mcp_servers": "connect to them in the client",
        "container": "this server runs no code",
        "max_completion_tokens": "its name here is max_tokens",
        "response_format": "its name here is output_config.format",
    }
    harmless: ClassVar[Mapping[str, object]] = {"mcp_servers": []}

    messages: list[Message] = Field(min_length=1)
    system: str | list[dict[str, Any]] = ""
    tools: list[dict[str, Any]] = Field([], max_length=256)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking = Thinking(type="disabled")
    output_config: OutputConfig = OutputConfig()
    output_format: dict[str, Any] | None = None
    metadata: dict[str, Any] = {}

    def check_fields(self) -> list[str]:
        return [*super().check_fields(), *ToolSet(self.tools).left_out]

    @property
    def reasons(self) -> bool | None:
        """Whether the model should reason first; None leaves it to its chat template."""
        return {"enabled": True, "disabled": False, "adaptive": None}[self.thinking.type]

    @property
    def effort(self) -> str | None:
        """How much the model should reason, if its chat template knows that."""
        effort = self.output_config.effort
        return None if effort is None else _EFFORTS.get(effort, effort)

    @property
    def json_format(self) -> dict[str, Any] | None:
        """The format of the answer, by its newer or its older name."""
        return self.output_config.format or self.output_format


class MessagesRequest(CountRequest):
    """POST /v1/messages"""

    max_tokens: Int = Field(ge=1)
    stop_sequences: Annotated[list[str], BeforeValidator(as_list), Field(max_length=256)] = []

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop_sequences)
