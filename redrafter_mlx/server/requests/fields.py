"""Values of request fields, read as clients send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AliasChoices, BeforeValidator, Field

SEEDS = 2**64


def as_int(given: object) -> object:
    """Return a float without a fraction as an integer: some clients send 4.0."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


def as_limit(given: object) -> object:
    """Return None for -1, which some clients send for no limit, or for no certain seed."""
    return None if given == -1 else as_int(given)


def as_top_k(given: object) -> object:
    """Return 0 for -1, which vLLM's clients send to switch it off."""
    return 0 if given == -1 else as_int(given)


def as_repetition(given: object) -> object:
    """Return 1 for 0, with which mlx-lm's server switches the penalty off."""
    return 1.0 if given == 0 and not isinstance(given, bool) else given


def as_alternatives(given: object) -> object:
    """Return no alternatives for `true`, and no log-probabilities for `false`, as mlx-lm's server.

    OpenAI's legacy endpoint takes the number of alternatives.
    """
    if isinstance(given, bool):
        return 0 if given else None
    return as_int(given)


Int = Annotated[int, BeforeValidator(as_int)]

Limit = Annotated[int | None, Field(ge=1), BeforeValidator(as_limit)]

Seed = Annotated[int | None, Field(ge=-(2**63), lt=SEEDS), BeforeValidator(as_limit)]
"""-1 asks for a new seed, as in vLLM and llama-server."""

ThinkingBudget = Annotated[
    int | None,
    Field(
        ge=0,
        validation_alias=AliasChoices(
            "thinking_token_budget", "thinking_budget_tokens", "thinking_budget"
        ),
    ),
    BeforeValidator(as_limit),
]
"""Maximum number of tokens of the reasoning, by vLLM's, llama-server's and Qwen's names."""


def as_list(given: object) -> object:
    """Return a string as a list of one; drop empty strings, which stop nothing."""
    texts = [given] if isinstance(given, str) else given
    return [t for t in texts if t != ""] if isinstance(texts, list) else texts


def as_text(given: object) -> object:
    """Return a message's content as one text; OpenAI allows it in parts."""
    if not isinstance(given, list):
        return given
    for part in given:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "refusal"):
            raise ValueError("only parts of type text are supported")
        if not isinstance(part.get(part["type"]), str):
            raise ValueError("a part of type text needs a text")
    return "".join(part[part["type"]] for part in given)


def as_options(given: object) -> object:
    """Turn `true`, which asks only for the fields of `x_redrafter`, into empty options."""
    return {} if given is True else given


def as_prompts(given: object) -> object:
    """Return a single prompt as a list of one."""
    one = isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int)
    return [given] if one else given
