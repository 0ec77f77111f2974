"""Schema of a request to OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from redrafter_mlx.server.requests.fields import Int, Limit, ThinkingBudget, as_list
from redrafter_mlx.server.requests.generation_request import GenerationRequest
from redrafter_mlx.server.requests.schema import Schema
from redrafter_mlx.server.responses.tools import ToolSet

ENCRYPTED = "reasoning.encrypted_content"
"""What `include` has for reasoning that the client sends back with the conversation."""

LOGPROBS = "message.output_text.logprobs"
"""What `include` has for log-probabilities of the tokens of texts."""

_STORED = "this server stores nothing: send the whole conversation as input"


class Reasoning(Schema):
    effort: str | None = None
    summary: str | None = None


class TextOptions(Schema):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(GenerationRequest):
    """POST /v1/responses"""

    refused: ClassVar[Mapping[str, str]] = {
        "previous_response_id": _STORED,
        "conversation": _STORED,
        "prompt": "this server has no stored prompts: send the text as input",
        "background": "ask for a stream",
        "n": "send several requests",
        "max_tokens": "its name here is max_output_tokens",
        "messages": "their name here is input",
        "response_format": "its name here is text.format",
    }
    harmless: ClassVar[Mapping[str, object]] = {"background": False, "n": 1}

    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: Limit = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    text: TextOptions = TextOptions()
    tools: list[dict[str, Any]] = Field([], max_length=256)
    tool_choice: str | dict[str, Any] | None = None
    include: list[str] = []
    top_logprobs: Int = Field(0, ge=0, le=20)
    store: bool = False
    prompt_cache_key: str | None = None
    client_metadata: dict[str, Any] | None = None
    metadata: dict[str, Any] = {}
    user: str | None = None
    stop: Annotated[list[str], BeforeValidator(as_list), Field(max_length=256)] = []
    thinking_token_budget: ThinkingBudget = None

    def check_fields(self) -> list[str]:
        return [*super().check_fields(), *ToolSet(self.tools).left_out]

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop)

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs if LOGPROBS in self.include else None

    @property
    def thinking(self) -> bool | None:
        """Whether the model should reason first; None leaves it to its chat template."""
        return False if self.reasoning.effort == "none" else None
