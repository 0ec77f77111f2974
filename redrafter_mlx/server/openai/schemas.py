"""Schemas of requests: OpenAI's names and bounds, and a few of llama-server's and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from redrafter_mlx.server.requests.fields import (
    Int,
    Limit,
    ThinkingBudget,
    as_alternatives,
    as_list,
    as_prompts,
    as_text,
)
from redrafter_mlx.server.requests.generation_request import GenerationRequest
from redrafter_mlx.server.requests.schema import Schema

_GRAMMARS = dict.fromkeys(
    ("grammar", "json_schema", "structured_outputs", "guided_json", "guided_regex",
     "guided_choice", "guided_grammar"),
    "give a response_format",
)  # fmt: skip
"""What llama-server and vLLM call a grammar for the answer."""


class StreamOptions(Schema):
    include_usage: bool = False


class TemplateOptions(Schema):
    """`chat_template_kwargs`, as in vLLM and llama-server; others are the template's variables."""

    open_ended = True

    enable_thinking: Annotated[
        bool | None, Field(validation_alias=AliasChoices("enable_thinking", "thinking"))
    ] = None
    reasoning_effort: str | None = None


class Message(Schema):
    """One message; `content` may be left out, and further fields are for the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str, BeforeValidator(as_text)] = ""
    tool_calls: list[dict[str, Any]] = []

    def given(self) -> dict[str, Any]:
        """Return the message as `check_messages` takes it."""
        role = "system" if self.role == "developer" else self.role  # OpenAI's newer name
        given = {**(self.model_extra or {}), "role": role, "content": self.content}
        return {**given, "tool_calls": self.tool_calls} if self.tool_calls else given


class OpenAIRequest(GenerationRequest):
    """Fields that both endpoints accept."""

    refused: ClassVar[Mapping[str, str]] = _GRAMMARS
    harmless: ClassVar[Mapping[str, object]] = {"grammar": ""}

    stream_options: StreamOptions = StreamOptions()
    n: Int = Field(1, ge=1, le=128)
    stop: Annotated[list[str], BeforeValidator(as_list), Field(max_length=256)] = []
    max_tokens: Limit = None
    response_format: dict[str, Any] | None = None

    @property
    def answers(self) -> int:
        return self.n

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop)


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions"""

    refused = _GRAMMARS | {
        "audio": "answers are text",
        "functions": "give tools",
        "function_call": "give tools",
        "web_search_options": "give the text that was found as a message",
    }
    harmless = {"functions": [], "function_call": "none", "grammar": ""}

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Limit = None
    logprobs: bool = False
    top_logprobs: Int = Field(0, ge=0, le=20)
    tools: list[dict[str, Any]] = Field([], max_length=128)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    modalities: list[Literal["text"]] = ["text"]
    reasoning_effort: str | None = None
    thinking_token_budget: ThinkingBudget = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def thinking(self) -> bool | None:
        """Whether the model should reason first; None leaves it to its chat template."""
        return False if self.effort == "none" else self.chat_template_kwargs.enable_thinking

    @property
    def starts_message(self) -> bool:
        """Whether the prompt ends with the start of a message of the assistant."""
        asked = self.add_generation_prompt
        return not self.continue_final_message if asked is None else asked

    @property
    def effort(self) -> str | None:
        """How much the model should reason, if its chat template knows that."""
        return self.reasoning_effort or self.chat_template_kwargs.reasoning_effort


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions"""

    refused = _GRAMMARS | {
        "suffix": "put it into the prompt",
        "best_of": "ask for n answers and choose",
    }
    harmless = {"suffix": "", "best_of": 1, "grammar": ""}

    prompt: Annotated[list[str | list[int]], BeforeValidator(as_prompts)] = Field(
        min_length=1, max_length=128
    )
    logprobs: Annotated[int | None, Field(ge=0, le=20), BeforeValidator(as_alternatives)] = None
    echo: bool = False

    @property
    def answers(self) -> int:
        return self.n * len(self.prompt)

    @property
    def alternatives(self) -> int | None:
        return self.logprobs
