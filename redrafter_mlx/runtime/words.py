"""Words for people: numbers of things."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """Return `1 question`, `2 questions`, `12,000 tokens`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def option_name(field: str) -> str:
    """Return the option of a field: `--beam-width` for `beam_width`."""
    return f"--{field.replace('_', '-')}"
