"""Help of a command with many options: the common ones, and the rest by `--help-all`."""

from __future__ import annotations

import copy
from typing import Any

from typer.core import TyperCommand

HELP_ALL = "--help-all"
"""Replaces `--help` on a command line; it is no option of a command."""

_MANY = 15
"""Options that fit on a screen: a command with more shows the common ones alone."""

COMMON = {
    "--answer-tokens", "--api-key", "--batch-size", "--beam-length", "--beam-width", "--cache-dir",
    "--compare", "--config", "--drafter", "--dry-run", "--form", "--host",
    "--hours", "--json", "--learn", "--limit", "--load-on-demand", "--max-concurrency",
    "--max-tokens", "--model", "--no-draft", "--output", "--paper", "--plot", "--port", "--prompt",
    "--prompts", "--quantize", "--questions", "--raw", "--recipe", "--report", "--seed", "--server",
    "--start-from", "--system", "--temperature",
}  # fmt: skip
"""Options that most people who use a command look for, by the first of their names."""


class Command(TyperCommand):
    """A command whose `--help` fits on a screen."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the common options and how many others there are, or all of a few."""
        shown, options = copy.copy(self), [p for p in self.params if _is_option(p)]
        rare = [p for p in options if p.opts[0] not in COMMON]
        if len(options) > _MANY and ctx.find_root().obj != HELP_ALL:
            shown.params = [p for p in self.params if p not in rare]
            shown.epilog = f"{len(rare)} more options: `{ctx.command_path} {HELP_ALL}`"
        super(Command, shown).format_help(ctx, formatter)


def _is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")
