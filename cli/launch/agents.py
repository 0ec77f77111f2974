"""Coding agents, and how each is told by its command line and environment to use a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from redrafter_mlx.errors import BadInputError, meant

_ID = "redrafter-mlx"
_NO_KEY = "none"  # a key for clients that insist on one, where the server has none

KEY_VARIABLE = "REDRAFTER_API_KEY"

_CLAUDES = (
    "ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL",
)  # fmt: skip
"""Variables with the models that Claude Code asks for."""

_ELSEWHERE = ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX")
"""Variables that send Claude Code elsewhere."""


@dataclass(frozen=True)
class Served:
    """The model of a running server."""

    url: str  # without a path
    model: str
    context: int | None  # maximum number of tokens of prompt and answer; None if it is not known
    api_key: str | None
    loaded: bool = True  # whether it is in memory


@dataclass(frozen=True)
class Start:
    """How an agent is started."""

    arguments: Sequence[str] = ()  # after its program, before the user's own
    variables: Mapping[str, str] | None = None  # of the environment
    unset: Sequence[str] = ()  # variables that would send it elsewhere


@dataclass(frozen=True)
class Agent:
    """A coding agent: its program, how npm names it, and how it is started."""

    program: str
    package: str
    start: Callable[[Served], Start]


def _codex(served: Served) -> Start:
    """Codex speaks Responses alone; after `-c` it reads TOML, which has JSON's strings."""
    provider = f'name = "{_ID}", base_url = "{served.url}/v1", wire_api = "responses"'
    variables = {}
    if served.api_key is not None:
        provider += f', env_key = "{KEY_VARIABLE}"'
        variables = {KEY_VARIABLE: served.api_key}
    settings = {
        f"model_providers.{_ID}": f"{{{provider}}}",
        "model_provider": json.dumps(_ID),
        "model": json.dumps(served.model),
    }
    if served.context is not None:
        settings["model_context_window"] = str(served.context)
    arguments = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
    return Start(arguments, variables)


def _claude(served: Served) -> Start:
    """Claude Code speaks Messages alone, and asks for several models, all of which are this one."""
    variables = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.api_key or _NO_KEY,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    variables |= dict.fromkeys(_CLAUDES, served.model)
    if served.context is not None:
        variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(served.context)
    return Start(variables=variables, unset=_ELSEWHERE)


def _opencode(served: Served) -> Start:
    """opencode merges a variable's JSON into its settings; it speaks chat completions."""
    model: dict[str, object] = {"name": served.model, "tool_call": True}
    if served.context is not None:
        model["limit"] = {"context": served.context, "output": served.context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": _ID,
        "options": {"baseURL": f"{served.url}/v1", "apiKey": served.api_key or _NO_KEY},
        "models": {served.model: model},
    }
    named = f"{_ID}/{served.model}"
    settings = {"provider": {_ID: provider}, "model": named, "small_model": named}
    return Start(variables={"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})


AGENTS: Mapping[str, Agent] = {
    "codex": Agent("codex", "@openai/codex", _codex),
    "claude": Agent("claude", "@anthropic-ai/claude-code", _claude),
    "opencode": Agent("opencode", "opencode-ai", _opencode),
}


def agent_named(name: str) -> Agent:
    """Return a known agent; raises BadInputError naming those that are known."""
    if name not in AGENTS:
        raise BadInputError(f"{name!r:.80} is no agent; {meant(name, AGENTS)}")
    return AGENTS[name]
