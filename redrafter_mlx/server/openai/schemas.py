"""Schemas of requests: OpenAI's names and bounds, and a few of llama-server's and ours."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.server.api_error import ApiError
from redrafter_mlx.server.openai.fields import (
    SEEDS,
    Int,
    Limit,
    Seed,
    as_alternatives,
    as_list,
    as_options,
    as_prompts,
    as_repetition,
    as_text,
    as_top_k,
)

_UNION_MEMBERS = ("str", "list[int]", "dict[str,any]")
"""Words that pydantic adds to the location of an error inside a union."""

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty",
)  # fmt: skip
"""Sampling parameters that `GenerationOptions` has under the same names."""

_GRAMMARS = dict.fromkeys(
    ("grammar", "json_schema", "structured_outputs", "guided_json", "guided_regex",
     "guided_choice", "guided_grammar"),
    "give a response_format",
)  # fmt: skip
"""What llama-server and vLLM call a grammar for the answer."""


_Parsed = TypeVar("_Parsed", bound="Schema")


class Schema(BaseModel):
    """A JSON object; null means that a field is left out, and unknown fields are collected."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}

    @classmethod
    def parse(cls: type[_Parsed], body: bytes) -> _Parsed:
        """Parse a request from a body; raises ApiError naming the first wrong field."""
        try:
            return cls.model_validate_json(body.removeprefix(codecs.BOM_UTF8))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = (str(part) for part in first["loc"])
            param = ".".join(p for p in where if p not in _UNION_MEMBERS) or None
            message = first["msg"].removeprefix("Value error, ")
            raise ApiError(400, f"{param or 'the body'}: {message}", param=param) from None


class StreamOptions(Schema):
    include_usage: bool = False


class OwnOptions(Schema):
    """`x_redrafter`: `true`, or an object."""

    draft: bool = True


class TemplateOptions(Schema):
    """`chat_template_kwargs`, as in vLLM and llama-server; others are the template's variables."""

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


class GenerationRequest(Schema):
    """Fields that both endpoints accept."""

    refused: ClassVar[Mapping[str, str]] = _GRAMMARS
    """Unsupported fields that would change the answer, and what to do instead."""

    harmless: ClassVar[Mapping[str, object]] = {"grammar": ""}
    """Values of these fields that change nothing, and are accepted."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Int = Field(1, ge=1, le=128)
    seed: Seed = None
    stop: Annotated[list[str], BeforeValidator(as_list), Field(max_length=256)] = []
    temperature: float = Field(0.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: Annotated[int, BeforeValidator(as_top_k)] = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: Annotated[float, BeforeValidator(as_repetition)] = Field(
        1.0, ge=0.01, le=100, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")],
                     Annotated[float, Field(ge=-100, le=100)]] = {}  # fmt: skip
    max_tokens: Limit = None
    response_format: dict[str, Any] | None = None
    x_redrafter: Annotated[OwnOptions, BeforeValidator(as_options)] | None = None

    @property
    def answers(self) -> int:
        """Number of requested answers."""
        return self.n

    @property
    def alternatives(self) -> int | None:
        """Number of likeliest tokens to report with each token; None without log-probabilities."""
        raise NotImplementedError

    def check_fields(self) -> list[str]:
        """Return the fields that were sent and ignored; raises ApiError for one that is refused."""
        extra = self.model_extra or {}
        for name, instead in self.refused.items():
            if name in extra and extra[name] != self.harmless.get(name):
                raise ApiError(400, f"{name} is not supported; {instead}", param=name)
        inside = [
            f"{name}.{key}"
            for name in type(self).model_fields
            if isinstance(value := getattr(self, name), Schema)
            for key in value.model_extra or {}
            if not isinstance(value, TemplateOptions)
        ]
        return sorted({*extra, *inside} - {"repeat_penalty"})  # its other name was read

    def options(self, number: int, max_tokens: int) -> GenerationOptions:
        """Return the options of one of the `n` answers; each answer has a different seed."""
        sampling = {name: getattr(self, name) for name in _SAMPLING}
        if self.top_p == 0:  # of no probability mass the likeliest token is left, as at OpenAI
            sampling |= {"top_p": 1.0, "temperature": 0.0}
        return GenerationOptions(
            max_tokens=max_tokens,
            seed=None if self.seed is None else (self.seed + number) % SEEDS,
            stop=tuple(self.stop),
            **sampling,
            logit_bias=tuple((int(token), bias) for token, bias in self.logit_bias.items()),
            draft=self.x_redrafter is None or self.x_redrafter.draft,
            logprobs=self.alternatives is not None,
        )


class ChatRequest(GenerationRequest):
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


class CompletionRequest(GenerationRequest):
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
