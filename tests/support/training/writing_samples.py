"""Options of small blocks, and their prompts as text."""

from __future__ import annotations

from tiny import byte_tokenizer

from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.options import WritingOptions

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15]]


def options(**changes: object) -> WritingOptions:
    return WritingOptions(**{"batch": 6, "max_answer_tokens": 12, **changes})  # type: ignore[arg-type]


def decode(text: Text) -> str:
    return str(byte_tokenizer().decode(text.prompt))


THINKS = "{% if enable_thinking %}<think>{% endif %}"
"""End of a chat template; mlx-lm tells it to think by default only if `<think>` is a token."""
