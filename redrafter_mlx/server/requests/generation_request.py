"""What requests of every API may ask of an answer: how it is sampled, and how it is drafted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import AliasChoices, BeforeValidator, Field

from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.server.api_error import ApiError
from redrafter_mlx.server.requests.fields import SEEDS, Seed, as_options, as_repetition, as_top_k
from redrafter_mlx.server.requests.schema import Schema

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty",
)  # fmt: skip
"""Sampling parameters that `GenerationOptions` has under the same names."""

_OTHER_NAMES = ("repeat_penalty", "thinking_budget_tokens", "thinking_budget")


class OwnOptions(Schema):
    """`x_redrafter`: `true`, or an object."""

    draft: bool = True
    learn: bool = True


class GenerationRequest(Schema):
    """Fields of all endpoints that generate; an API's own bounds and names are in its schema."""

    refused: ClassVar[Mapping[str, str]] = {}
    """Unsupported fields that would change the answer, and what to do instead."""

    harmless: ClassVar[Mapping[str, object]] = {}
    """Values of these fields that change nothing, and are accepted."""

    model: str | None = None
    stream: bool = False
    seed: Seed = None
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
    x_redrafter: Annotated[OwnOptions, BeforeValidator(as_options)] | None = None

    @property
    def answers(self) -> int:
        """Number of requested answers."""
        return 1

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        return ()

    @property
    def alternatives(self) -> int | None:
        """Number of likeliest tokens to report with each token; None without log-probabilities."""
        return None

    def check_fields(self) -> list[str]:
        """Return the fields that were sent and ignored; raises ApiError for one that is refused."""
        extra = self.model_extra or {}
        for name, instead in self.refused.items():
            if name in extra and extra[name] != self.harmless.get(name):
                raise ApiError(400, f"{name} is not supported; {instead}", param=name)
        return sorted({*self.unread()} - {*_OTHER_NAMES})  # which were read

    @property
    def own(self) -> OwnOptions:
        """What the request asks for by `x_redrafter`, or the defaults."""
        return self.x_redrafter or OwnOptions()

    def options(self, number: int, max_tokens: int) -> GenerationOptions:
        """Return the options of one of the answers; each answer has a different seed."""
        sampling = {name: getattr(self, name) for name in _SAMPLING}
        if self.top_p == 0:  # of no probability mass the likeliest token is left, as at OpenAI
            sampling |= {"top_p": 1.0, "temperature": 0.0}
        return GenerationOptions(
            max_tokens=max_tokens,
            seed=None if self.seed is None else (self.seed + number) % SEEDS,
            stop=self.stops,
            **sampling,
            logit_bias=tuple((int(token), bias) for token, bias in self.logit_bias.items()),
            draft=self.own.draft,
            learn=self.own.learn,
            logprobs=self.alternatives is not None,
        )
